"""A model on a node that lacks it: copied once from a node that has it, and found again by what it holds.

Copies are in SLUICE_HOME/cache/models, named by their content; the two that were used last stay, and all of the last
hour's: a run looks for each of its models before it loads the first.
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

_NUM_KEPT = 2
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
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _alone(folder / f".{copy.name}.lock"):
        # Looked into: what a machine that lost its power had not yet written is there, and empty.
        if not wanted.is_at(copy, with_weights=True):
            shutil.rmtree(copy, ignore_errors=True)
            _bring(wanted, read, copy)
        os.utime(copy)
    _forget_old(folder, copy)
    return copy


def _bring(wanted: ModelFiles, read: ReadFile, copy: Path) -> None:
    aside = copy.with_name(f".{copy.name}.coming")
    shutil.rmtree(aside, ignore_errors=True)  # of one that was cut short
    free = shutil.disk_usage(copy.parent).free
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


def _forget_old(folder: Path, used: Path) -> None:
    """Remove all copies but those used last."""
    copies = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".") and path != used]
    for path in sorted(copies, key=lambda path: path.stat().st_mtime, reverse=True)[_NUM_KEPT - 1 :]:
        if path.stat().st_mtime < time.time() - _IN_USE_S:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait for other processes of this node that are within the block."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
