"""Files that are complete or unchanged."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.disk.files import replace_file, replacing

_ON_A_DISK_WITHOUT_ROOM = """
import resource, signal, sys
from pathlib import Path
from protocol.disk.files import replace_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))
try:
    replace_file(Path(sys.argv[1]), b"longer than four bytes")
except OSError as error:
    print(error.strerror)
"""


def test_replaced_file_has_the_new_content_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_file_is_as_before_when_the_disk_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    command = [sys.executable, "-c", _ON_A_DISK_WITHOUT_ROOM, str(tmp_path / "file")]
    finished = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert finished.stdout == "File too large\n"
    assert (tmp_path / "file").read_bytes() == b"old"


def test_file_is_unchanged_when_its_writer_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(IsADirectoryError), replacing(tmp_path / "file") as aside:
        _write_half(aside)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    (tmp_path / ".file").touch(0o666)  # an earlier writer crashed
    with replacing(tmp_path / "file", mode=0o600) as aside:
        assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path, writer="1") as one:
        with replacing(path, writer="2") as other:
            other.write_bytes(b"second")
        one.write_bytes(b"first")
    assert path.read_bytes() == b"first"


def _write_half(path: Path) -> None:
    path.write_bytes(b"half")
    raise IsADirectoryError
