"""Whether two nodes share a folder: one leaves a mark there, the other reads it and leaves one beside it."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import OperatorError


@dataclass(frozen=True)
class Mark:
    """What one node left in a folder."""

    path: Path  # a name that was never there before, so that no node remembers it as missing
    text: str  # what stands in it


@contextmanager
def shared_mark(folder: Path) -> Iterator[Mark]:
    """Leave a mark in a folder within the block. Raises: OperatorError when it cannot be written."""
    mark = Mark(folder / f".shared_{secrets.token_hex(8)}", secrets.token_hex(8))
    try:
        _leave(mark)
        yield mark
    finally:
        for path in (mark.path, *folder.glob(f"{mark.path.name}.*")):
            path.unlink(missing_ok=True)


def _leave(mark: Mark) -> None:
    try:
        with mark.path.open("w") as file:
            file.write(mark.text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OperatorError(
            f"{mark.path.parent} cannot be written: {error.strerror}. Free the disk, then run again."
        ) from None


def sees(mark: Mark) -> bool:
    """Return whether this process reads a mark and can write beside it."""
    try:
        is_same = mark.path.read_text() == mark.text
        mark.path.with_name(f"{mark.path.name}.{os.getpid()}").touch()
    except OSError:
        return False
    return is_same
