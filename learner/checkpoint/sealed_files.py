"""A folder's files by size and SHA-256: listed once they are on the disk, and compared with that list later."""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from learner.disk.whole_file import sync

# Hashing is what takes longest at a large checkpoint; it runs outside the interpreter's lock.
_HASH_THREADS = min(8, os.cpu_count() or 1)

Listed = Mapping[str, Mapping[str, object]]


def seal_files(folder: Path) -> dict[str, dict[str, object]]:
    """Return name -> {bytes, sha256} of every file under the folder; their bytes are on the disk then.

    Raises: OSError.
    """
    files = files_under(folder)
    for file in files.values():
        sync(file)
    sizes = [file.stat().st_size for file in files.values()]
    hashes = _hash_all(files.values())
    return {name: {"bytes": size, "sha256": sha256} for name, size, sha256 in zip(files, sizes, hashes, strict=True)}


def first_difference(folder: Path, listed: Listed, unlisted: str) -> str | None:
    """Return what is not as listed, None when every byte is. unlisted: the one file that the list leaves out.

    Nothing is opened before its name, kind and size are right: a pipe would block whoever opens it.
    """
    present = files_under(folder)
    present.pop(unlisted, None)
    for name in sorted(listed.keys() ^ present.keys()):
        return f"{folder / name} {'is missing' if name in listed else 'is not in the manifest'}"
    try:
        for name, file in present.items():
            if (problem := _wrong_kind_or_size(file, listed[name])) is not None:
                return problem
        for (name, file), found in zip(present.items(), _hash_all(present.values()), strict=True):
            if found != (expected := listed[name]["sha256"]):
                return f"{file} is not what the manifest says: its SHA-256 is {found}, expected {expected}"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    return None


def files_under(folder: Path) -> dict[str, Path]:
    """Return everything under the folder that is no folder, by name. A link to a folder is one of them."""
    return {str(PurePosixPath(path.relative_to(folder))): path for path in _walk(folder)}


def _walk(folder: Path) -> Iterator[Path]:
    for base, folders, names in os.walk(folder):
        for name in sorted([*names, *(f for f in folders if (Path(base) / f).is_symlink())]):
            yield Path(base) / name


def _wrong_kind_or_size(file: Path, listed: Mapping[str, object]) -> str | None:
    status = file.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{file} is a link: what it points at can change"
    if not stat.S_ISREG(status.st_mode):
        return f"{file} is no file but a device, socket or pipe"
    if status.st_size != listed["bytes"]:
        return f"{file} is not what the manifest says: it has {status.st_size} bytes, expected {listed['bytes']}"
    return None


def _hash_all(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return list(pool.map(_hash, paths))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
