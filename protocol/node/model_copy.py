"""A model on a node that lacks it: copied once from a node that has it, and found again by what it holds.

Copies are in SLUICE_HOME/cache/models, named by their content; the four that were used last stay, where the disk has
room for what comes, and all of the last hour's: a run looks for each of its models before it loads the first.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from protocol.errors import NeighbourError, OperatorError
from protocol.node.home import sluice_home
from protocol.node.model_files import ModelFiles

ReadFile = Callable[[str, int], Iterator[bytes]]
"""Called with a file's path on the node that has it, and its bytes; yields them in order."""

# A run's own: its policy, that policy after a warm start, a critic, a reference.
_NUM_KEPT = 4
_IN_USE_S = 3600.0
_log = logging.getLogger(__name__)


def have_model(wanted: ModelFiles, read: ReadFile, with_weights: bool) -> Path:
    """Return a folder of this node that holds the model: its own under the same path, or a copy, made now if need be.

    Blocks while the files come, and while another process of this node brings the same model. with_weights: False for
    whoever is pushed other weights before it uses any.
    Raises: OperatorError when they do not fit on the disk, NeighbourError when they do not come as they were told.
    """
    own = Path(wanted.path)
    if wanted.is_at(own, with_weights):
        return own
    folder = sluice_home() / "cache" / "models"
    copy = folder / f"{wanted.shape}-{wanted.weights}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone(copy):
            # Looked into: what a machine that lost its power had not yet written is there, and empty.
            if not wanted.is_at(copy, with_weights=True):
                shutil.rmtree(copy, ignore_errors=True)
                _bring(wanted, read, copy)
            os.utime(copy)
        _forget_old(folder, copy)
    except OSError as error:
        raise OperatorError(
            f"This node lacks the model {wanted.path} and cannot keep a copy in {folder}: {error.strerror}. Set "
            "SLUICE_HOME to a folder of your own on a disk with room."
        ) from None
    return copy


def _bring(wanted: ModelFiles, read: ReadFile, copy: Path) -> None:
    aside = copy.with_name(f".{copy.name}.coming")
    shutil.rmtree(aside, ignore_errors=True)  # of one that was cut short
    _make_room(copy.parent, wanted.num_bytes)
    free = _free_bytes(copy.parent)
    if wanted.num_bytes > free:
        raise OperatorError(
            f"This node lacks the model {wanted.path} and has no room for it: {wanted.num_bytes:,} bytes, and {free:,} "
            f"are free in {copy.parent}. Make room, or set SLUICE_HOME to a folder on a larger disk."
        )
    began = time.monotonic()
    _log.warning("this node lacks the model  path=%s bytes=%d  it is copied to %s", wanted.path, wanted.num_bytes, copy)
    try:
        aside.mkdir()
        for name, size in wanted.files.items():
            with (aside / name).open("wb") as file:
                for piece in read(str(Path(wanted.path) / name), size):
                    file.write(piece)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise OperatorError(f"The model {wanted.path} cannot be copied to {copy}: {error.strerror}.") from None
    if not wanted.is_at(aside, with_weights=True):
        shutil.rmtree(aside, ignore_errors=True)
        raise NeighbourError(
            "model", f"{wanted.path} changed while it was copied. Give the command again once nothing writes to it"
        )
    aside.rename(copy)
    _log.warning("the model was copied  path=%s seconds=%.1f", wanted.path, time.monotonic() - began)


def _make_room(folder: Path, num_bytes: int) -> None:
    """Remove copies, the one used longest ago first, until so many bytes are free; none where all would not do."""
    unused = [path for path in reversed(_by_last_use(folder)) if _is_unused(path)]
    if num_bytes > _free_bytes(folder) + sum(map(_bytes_of, unused)):
        return
    for path in unused:
        if num_bytes <= _free_bytes(folder):
            return
        _remove_unused(path)


def _forget_old(folder: Path, used: Path) -> None:
    """Remove all copies but those used last, and what is left of copying that was cut short."""
    for path in [path for path in _by_last_use(folder) if path != used][_NUM_KEPT - 1 :]:
        _remove_unused(path)
    for aside in folder.glob(".*.coming"):
        with _alone(folder / aside.name[1 : -len(".coming")], is_waiting=False) as is_alone:
            if is_alone:
                shutil.rmtree(aside, ignore_errors=True)


def _by_last_use(folder: Path) -> list[Path]:
    """Return the copies, the one used last first."""
    copies = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted(copies, key=_last_use, reverse=True)


def _remove_unused(copy: Path) -> None:
    """Remove a copy, unless it is used, or another process of this node looks whether it is whole."""
    with _alone(copy, is_waiting=False) as is_alone:
        if is_alone and _is_unused(copy):
            shutil.rmtree(copy, ignore_errors=True)


def _is_unused(copy: Path) -> bool:
    return _last_use(copy) < time.time() - _IN_USE_S


def _last_use(copy: Path) -> float:
    """Return Unix seconds; 0 of a copy that another process has just removed."""
    try:
        return copy.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _bytes_of(copy: Path) -> int:
    try:
        return sum(path.stat().st_size for path in copy.iterdir())
    except FileNotFoundError:
        return 0


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def _alone(copy: Path, *, is_waiting: bool = True) -> Iterator[bool]:
    """Keep other processes of this node from a copy within the block; yields whether they are kept from it.

    is_waiting: until one that is within such a block has left it; False: then they are not.
    """
    with copy.with_name(f".{copy.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
            is_alone = True
        except BlockingIOError:
            is_alone = False
        yield is_alone
