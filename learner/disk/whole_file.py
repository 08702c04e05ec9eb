"""Files that are whole or as they were before, whatever dies in between: written aside, fsynced, renamed."""

import os
import shutil
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Give the file this content. Raises: OSError; the file is then as before."""
    aside = aside_of(path)
    write_synced(aside, content)
    move_synced(aside, path)


def copy_synced(source: Path, target: Path) -> None:
    """Copy a file's content; it is on the disk when this returns. Raises: OSError."""
    shutil.copyfile(source, target)
    sync(target)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file; it is on the disk when this returns. Raises: OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def move_synced(source: Path, target: Path) -> None:
    """Rename a file within its folder, over what has the name now; that lasts when this returns. Raises: OSError."""
    source.replace(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Have what a file holds, or which names a folder holds, reach the disk. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside_of(path: Path) -> Path:
    """Return where a file's next content is written: a hidden name beside it, taken over by whoever starts next."""
    return path.with_name(f".{path.name}")
