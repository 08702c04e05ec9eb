"""A folder's files by size and SHA-256: a list of them, and the comparison with such a list."""

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from protocol.disk.files import sync

# Hashing takes most of the time of a large checkpoint; it runs outside the interpreter's lock.
_HASH_THREADS = min(8, os.cpu_count() or 1)

_READ_BYTES = 1 << 20
_REPORT_EVERY_BYTES = 1 << 28

Report = Callable[[str], None]
"""Receives the phase of long work in words. A wait for this rank is extended while its phase changes."""

Listed = Mapping[str, Mapping[str, object]]


def no_report(_: str) -> None:
    """Drop the phase."""


def seal_files(folder: Path, report: Report = no_report) -> dict[str, dict[str, object]]:
    """Return name -> {bytes, sha256} of every file under the folder, after an fsync of each.

    Raises: OSError.
    """
    files = files_under(folder)
    for name, file in files.items():
        report(f"syncing {name}")
        sync(file)
    sizes = [file.stat().st_size for file in files.values()]
    hashes = _hash_all(files.values(), _ByteCounter("hashing", report))
    return {name: {"bytes": size, "sha256": sha256} for name, size, sha256 in zip(files, sizes, hashes, strict=True)}


def first_difference(folder: Path, listed: Listed, unlisted: Container[str], report: Report = no_report) -> str | None:
    """Return the first difference from the list, or None. unlisted: files that the list omits.

    Names, kinds and sizes are compared before any file is opened: opening a pipe would block.
    """
    if (problem := first_wrong_entry(folder, listed, unlisted)) is not None:
        return problem
    try:
        present = _listable(folder, unlisted)
        hashes = _hash_all(present.values(), _ByteCounter("reading back", report))
        for (name, file), found in zip(present.items(), hashes, strict=True):
            if found != (expected := listed[name]["sha256"]):
                return f"{file} differs from the manifest: its SHA-256 is {found}, expected {expected}"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    return None


def first_wrong_entry(folder: Path, listed: Listed, unlisted: Container[str]) -> str | None:
    """Return the first file of another name, kind or size than listed, or None. No content is read."""
    try:
        present = _listable(folder, unlisted)
        if different := listed.keys() ^ present.keys():
            name = min(different)
            return f"{folder / name} {'is missing' if name in listed else 'is not in the manifest'}"
        problems = (_wrong_kind_or_size(file, listed[name]) for name, file in present.items())
        return next((problem for problem in problems if problem is not None), None)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"


def files_under(folder: Path) -> dict[str, Path]:
    """Return name -> path of every file under the folder, links included. Names are relative, with slashes.

    Raises: OSError for a folder that cannot be listed.
    """
    return {str(PurePosixPath(path.relative_to(folder))): path for path in _walk(folder)}


def _listable(folder: Path, unlisted: Container[str]) -> dict[str, Path]:
    return {name: file for name, file in files_under(folder).items() if name not in unlisted}


def _walk(folder: Path) -> Iterator[Path]:
    # By default os.walk skips a folder that it cannot list: its files would be missing from the manifest.
    for base, folders, names in os.walk(folder, onerror=_raise):
        for name in sorted([*names, *(f for f in folders if (Path(base) / f).is_symlink())]):
            yield Path(base) / name


def _raise(error: OSError) -> None:
    raise error


def _wrong_kind_or_size(file: Path, listed: Mapping[str, object]) -> str | None:
    status = file.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{file} is a link: its target can change"
    if not stat.S_ISREG(status.st_mode):
        return f"{file} is a device, socket or pipe"
    if status.st_size != listed["bytes"]:
        return f"{file} differs from the manifest: it has {status.st_size} bytes, expected {listed['bytes']}"
    return None


class _ByteCounter:
    """Counts the bytes that several threads read, and reports the sum from time to time."""

    def __init__(self, verb: str, report: Report) -> None:
        self._verb = verb
        self._report = report
        self._num_bytes = self._num_reported = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            if self._num_bytes - self._num_reported >= _REPORT_EVERY_BYTES:
                self._num_reported = self._num_bytes
                self._report(f"{self._verb}: {self._num_bytes >> 20} MiB")


def _hash_all(paths: Iterable[Path], progress: _ByteCounter) -> list[str]:
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return list(pool.map(lambda path: _hash(path, progress), paths))


def _hash(path: Path, progress: _ByteCounter) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
            progress.add(num_bytes)
    return digest.hexdigest()
