"""The index of a data set: file, offset, uid and hash of each prompt. Other processes load it instead of the rows.

A million rows take 34 MB; their texts stay in their files.
"""

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.data.files import RowFile
from learner.data.prompts import HASH_BYTES, UID_BYTES
from protocol.disk.files import replacing


@dataclass(frozen=True)
class IndexedFile:
    """The state of a file when its rows were read."""

    path: str
    name: str  # part of its rows' uids
    entry: int  # index of its entry in data.train, from 0
    num_rows: int
    size: int  # bytes
    mtime_ns: int

    def is_unchanged(self) -> bool:
        """Return whether the file still has the same size and modification time."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True)
class PromptIndex:
    """The N usable rows, file by file and in each file's order."""

    key: str  # settings of the data set as text
    files: tuple[IndexedFile, ...]
    numbers: NDArray[np.int64]  # [N] line or row in its file, from 1
    offsets: NDArray[np.int64]  # [N] first byte of the line; row index in a Parquet file
    uids: NDArray[np.uint8]  # [N, 10]
    row_hashes: NDArray[np.uint8]  # [N, 8] `Prompt.row_hash`

    def __len__(self) -> int:
        return len(self.numbers)

    def uid(self, place: int) -> str:
        return bytes(self.uids[place]).hex()

    def row_hash(self, place: int) -> bytes:
        return bytes(self.row_hashes[place])

    def file_of(self, place: int) -> int:
        """Return the index of the file with the row of a place."""
        return bisect_right(self._ends, place)

    @property
    def rows_by_entry(self) -> list[int]:
        """Number of rows of each entry of data.train."""
        counts = [0] * (max((file.entry for file in self.files), default=-1) + 1)
        for file in self.files:
            counts[file.entry] += file.num_rows
        return counts

    def digest(self) -> str:
        """Return a hash over all uids in their order, which every attempt of a run must share."""
        return hashlib.sha256(self.uids.tobytes().hex("\n", UID_BYTES).encode()).hexdigest()

    def rows_digest(self) -> str:
        """Return a hash over all rows' contents in their order."""
        return hashlib.sha256(self.row_hashes.tobytes()).hexdigest()

    def places(self, uids: Sequence[str]) -> dict[str, int]:
        """Return the place of each uid that is in the index."""
        wanted = np.frombuffer(bytes.fromhex("".join(uids)), np.uint8).reshape(-1, UID_BYTES)
        mine, theirs = _as_items(self.uids), _as_items(wanted)
        found = np.flatnonzero(np.isin(mine, theirs))
        return {self.uid(place): int(place) for place in found}

    def is_current(self, key: str) -> bool:
        """Return whether the index was made with these settings from the files as they are now."""
        return key == self.key and all(file.is_unchanged() for file in self.files)

    def save(self, path: Path) -> None:
        """Write the index to a file, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"key": self.key, "files": [asdict(file) for file in self.files]}
        with replacing(path) as aside, aside.open("wb") as file:
            np.savez(
                file,
                about=np.frombuffer(json.dumps(about).encode(), np.uint8),
                numbers=self.numbers,
                offsets=self.offsets,
                uids=self.uids,
                row_hashes=self.row_hashes,
            )

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(file.num_rows for file in self.files))


def load_index(path: Path) -> PromptIndex:
    """Return the index of a file. Raises: OSError, TypeError, ValueError or KeyError for another kind of file."""
    with np.load(path, allow_pickle=False) as content:
        about = json.loads(content["about"].tobytes())
        files = tuple(IndexedFile(**file) for file in about["files"])
        arrays = (content[name] for name in ("numbers", "offsets", "uids", "row_hashes"))
        return PromptIndex(about["key"], files, *arrays)


class IndexBuilder:
    """Builds an index row by row, file by file."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._files: list[IndexedFile] = []
        self._begins: list[int] = []
        self._numbers = array("q")
        self._offsets = array("q")
        self._uids = bytearray()
        self._row_hashes = bytearray()

    def begin(self, file: RowFile) -> None:
        """Start a file: the rows added next belong to it."""
        found = file.path.stat()
        self._files.append(
            IndexedFile(str(file.path), file.name, file.entry, 0, size=found.st_size, mtime_ns=found.st_mtime_ns)
        )
        self._begins.append(len(self._numbers))

    def add(self, number: int, offset: int, uid: str, row_hash: bytes) -> int:
        """Add a row and return its place."""
        self._numbers.append(number)
        self._offsets.append(offset)
        self._uids += bytes.fromhex(uid)
        self._row_hashes += row_hash
        return len(self._numbers) - 1

    def finish(self, without: Collection[int]) -> PromptIndex:
        """Return the index without the rows of these places."""
        numbers = np.frombuffer(self._numbers, np.int64)
        offsets = np.frombuffer(self._offsets, np.int64)
        uids = np.frombuffer(bytes(self._uids), np.uint8).reshape(-1, UID_BYTES)
        row_hashes = np.frombuffer(bytes(self._row_hashes), np.uint8).reshape(-1, HASH_BYTES)
        kept = np.ones(len(numbers), np.bool_)
        kept[np.fromiter(without, np.int64, len(without))] = False
        ends = [*self._begins[1:], len(numbers)]
        files = tuple(
            IndexedFile(**(asdict(file) | {"num_rows": int(kept[begin:end].sum())}))
            for file, begin, end in zip(self._files, self._begins, ends, strict=True)
        )
        return PromptIndex(self._key, files, numbers[kept], offsets[kept], uids[kept], row_hashes[kept])


def _as_items(uids: NDArray[np.uint8]) -> NDArray[np.void]:
    """Return each row of bytes as one comparable item."""
    return np.ascontiguousarray(uids).view(np.dtype((np.void, UID_BYTES))).ravel()
