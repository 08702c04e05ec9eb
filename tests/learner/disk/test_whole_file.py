"""Files that are whole or as before."""

import subprocess
import sys
from pathlib import Path

from learner.disk.whole_file import replace_file

_ON_A_DISK_WITHOUT_ROOM = """
import resource, signal, sys
from pathlib import Path
from learner.disk.whole_file import replace_file
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
