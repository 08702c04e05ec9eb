"""The run folder: made whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from learner.run_folder import RunStart, prepare_folder
from protocol.errors import OperatorError
from protocol.settings import Settings

# A disk that refuses every byte: files of size 0 may still be made, as on a disk that fills up between check and write.
_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from learner.run_folder import RunStart, prepare_folder
from protocol.errors import OperatorError
from protocol.settings import Settings
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    prepare_folder(RunStart(Path(sys.argv[1]), None), Settings())
except OperatorError as error:
    print(error)
"""


def test_prepare_makes_a_folder_with_its_settings(tmp_path: Path) -> None:
    prepare_folder(RunStart(tmp_path / "runs" / "a", None), Settings())
    assert sorted(path.name for path in (tmp_path / "runs" / "a").iterdir()) == ["checkpoints", "logs", "settings.yaml"]


def test_prepare_sets_aside_the_accounts_of_a_life_without_a_checkpoint(tmp_path: Path) -> None:
    for name in ("ledger.sqlite", "metrics.jsonl"):
        (tmp_path / name).write_text("old", encoding="utf-8")
    prepare_folder(RunStart(tmp_path, None), Settings())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "logs", "settings.yaml"]
    aside = sorted(path.name.split("_", 2)[2] for path in (tmp_path / "logs").iterdir())
    assert aside == ["ledger.sqlite", "metrics.jsonl"]


def test_prepare_leaves_no_new_folder_when_the_disk_is_full(tmp_path: Path) -> None:
    folder = tmp_path / "full"
    finished = subprocess.run(
        [sys.executable, "-c", _ON_A_FULL_DISK, str(folder)], capture_output=True, text=True, check=True
    )
    assert finished.stdout == (
        f"The run folder {folder} cannot be written: File too large. Set run.dir to a folder on a disk with room.\n"
    )
    assert not folder.exists()


def test_prepare_keeps_a_folder_that_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way", encoding="utf-8")
    with pytest.raises(OperatorError, match=f"The run folder {tmp_path} cannot be written: File exists."):
        prepare_folder(RunStart(tmp_path, None), Settings())
    assert (tmp_path / "checkpoints").read_text(encoding="utf-8") == "in the way"
