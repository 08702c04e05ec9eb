"""Whether another node sees what this one writes: played with folders that are the same, or not."""

from dataclasses import replace
from pathlib import Path

import pytest

from learner.disk.shared_folder import sees, shared_mark
from protocol.errors import OperatorError
from tests.fakes.full_disk import WHY, full_disk


def test_mark_is_seen_in_a_shared_folder_and_nothing_is_left_behind(tmp_path: Path) -> None:
    with shared_mark(tmp_path) as mark:
        assert sees(mark)
    assert list(tmp_path.iterdir()) == []


def test_folder_of_the_same_path_on_another_disk_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with shared_mark(tmp_path) as mark:
        assert not sees(replace(mark, path=tmp_path / "elsewhere" / mark.path.name))
        assert not sees(replace(mark, path=tmp_path / "nowhere" / mark.path.name))
        assert not sees(replace(mark, text="another"))


def test_full_disk_is_said_in_a_sentence_and_nothing_is_left_behind(tmp_path: Path) -> None:
    said = f"{tmp_path} cannot be written: {WHY}. Free the disk"
    with pytest.raises(OperatorError, match=said), full_disk(), shared_mark(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_a_file_is_an_operators_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError, match="Not a directory"), shared_mark(tmp_path / "file"):
        pass
