"""A start that is refused, or stopped before it trains, leaves the run folder as it was.

These are its accounts, settings, and the names of its checkpoints.

Links keep the old files, which a start replaces and never writes in place.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from learner.checkpoint.folder import LATEST, point_latest
from learner.disk.run_folder import (
    CHECKPOINTS,
    INSTALLATION,
    LEDGER,
    LOGS,
    MODELS,
    RECORDS,
    SETTINGS,
    SKIPPED_ROWS,
    TRAIN_INDEX,
)
from protocol.settings.loader import GIVEN

_ACCOUNTS = (LEDGER, *LOGS, *RECORDS, SETTINGS, GIVEN, SKIPPED_ROWS, TRAIN_INDEX, INSTALLATION, MODELS)
_KEPT = ".before_start"


@contextlib.contextmanager
def undone_if_refused(folder: Path) -> Iterator[None]:
    """Restore the folder after the block, unless `accept_start` was called.

    A new run that was stopped stays: its folder held nothing before.
    """
    kept, root = folder / _KEPT, folder / CHECKPOINTS
    accept_start(folder)  # left by a killed command
    checkpoints, latest = _by_inode(root), (root / LATEST).resolve()
    try:
        kept.mkdir()
        for name in _ACCOUNTS:
            if (folder / name).exists():
                os.link(folder / name, kept / name)
    except OSError:  # a file system without links keeps none
        accept_start(folder)
    is_undone = True
    try:
        yield
        is_undone = bool(checkpoints)
    finally:
        if is_undone and kept.exists():
            _restore(folder)
            for inode, path in _by_inode(root).items():
                path.rename(checkpoints.get(inode, path))
            if latest in checkpoints.values():
                point_latest(root, latest)
        accept_start(folder)


def accept_start(folder: Path) -> None:
    """Drop the old files: the run trains."""
    shutil.rmtree(folder / _KEPT, ignore_errors=True)


def _restore(folder: Path) -> None:
    inodes = {path.stat().st_ino for path in (folder / _KEPT).iterdir()}
    for path in (folder / "logs").glob("before_*"):  # also set aside by this start
        if path.stat().st_ino in inodes:
            path.unlink()
    for name in _ACCOUNTS:
        (folder / name).unlink(missing_ok=True)
        if (folder / _KEPT / name).exists():
            (folder / _KEPT / name).rename(folder / name)


def _by_inode(root: Path) -> dict[int, Path]:
    folders = (path for path in root.glob("*") if path.is_dir() and not path.is_symlink() and path.name != LATEST)
    return {path.stat().st_ino: path.resolve() for path in folders}
