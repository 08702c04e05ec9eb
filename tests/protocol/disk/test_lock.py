"""Locks between processes."""

import math
import threading
from pathlib import Path

import pytest

from protocol.disk.lock import file_lock, try_lock


def test_lock_is_refused_while_another_holds_it_and_free_after_its_block(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path), pytest.raises(BlockingIOError, match="is locked by another process"), file_lock(path):
        pass
    with file_lock(path):
        pass


def test_lock_is_free_after_an_error_in_its_block(tmp_path: Path) -> None:
    with pytest.raises(KeyError), file_lock(tmp_path / "lock"):
        raise KeyError
    with file_lock(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("wait_s", [30.0, math.inf])
def test_lock_is_awaited(tmp_path: Path, wait_s: float) -> None:
    order = []
    with file_lock(tmp_path / "lock"):
        waiter = threading.Thread(target=lambda: _note_second(order, tmp_path / "lock", wait_s))
        waiter.start()
        waiter.join(0.1)
        order.append("first")
    waiter.join(30)
    assert order == ["first", "second"]


def test_folder_can_be_locked(tmp_path: Path) -> None:
    with file_lock(tmp_path), pytest.raises(BlockingIOError), file_lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lock_file_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("content")
    with file_lock(path):
        assert path.read_text() == "content"


def test_shared_locks_exclude_only_an_exclusive_one(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open() as one, (tmp_path / "lock").open() as other:
        assert try_lock(one.fileno(), is_shared=True)
        assert try_lock(other.fileno(), is_shared=True)
        with pytest.raises(BlockingIOError), file_lock(tmp_path / "lock"):
            pass


def _note_second(order: list[str], path: Path, wait_s: float) -> None:
    with file_lock(path, wait_s=wait_s):
        order.append("second")
