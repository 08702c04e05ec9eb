"""A test whether two nodes share a folder: one writes a mark, the other reads it and writes a second one."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.disk.files import naming_disk_errors


@dataclass(frozen=True)
class Mark:
    """A mark of one node in a folder."""

    path: Path  # a new name, which no node has cached as missing
    text: str


@contextlib.contextmanager
def shared_mark(folder: Path) -> Iterator[Mark]:
    """Write a mark to a folder for the time of the block. Raises: OperatorError when it cannot be written."""
    mark = Mark(folder / f".shared_{secrets.token_hex(8)}", secrets.token_hex(8))
    try:
        with (
            naming_disk_errors(f"{folder} cannot be written", "Free the disk, then run again."),
            mark.path.open("w") as file,
        ):
            file.write(mark.text)
            file.flush()
            os.fsync(file.fileno())
        yield mark
    finally:
        for path in (mark.path, *folder.glob(f"{mark.path.name}.*")):
            with contextlib.suppress(OSError):  # a mark that stays is harmless; an error here would hide the block's
                path.unlink()


def sees(mark: Mark) -> bool:
    """Return whether this process reads the mark and can write to its folder."""
    try:
        is_same = mark.path.read_text() == mark.text
        mark.path.with_name(f"{mark.path.name}.{os.getpid()}").touch()
    except OSError:
        return False
    return is_same
