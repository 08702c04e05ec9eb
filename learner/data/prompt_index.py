"""Where each prompt of a data set lies and what it is called: read once, small, and shared with other processes.

A million rows take 26 MB; their texts stay in their files.
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
from learner.data.names import UID_BYTES
from protocol.disk.files import replacing


@dataclass(frozen=True)
class IndexedFile:
    """One file as it was when its rows were read."""

    path: str
    name: str  # part of its rows' uids
    entry: int  # which entry of data.train it belongs to, counted from 0
    num_rows: int  # in the index
    size: int  # bytes
    mtime_ns: int

    def is_unchanged(self) -> bool:
        """Return whether the file is as it was, as far as its size and time tell."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True)
class PromptIndex:
    """The rows that are used, file by file and in each file's order. N rows."""

    said: str  # what the settings said of the data set
    files: tuple[IndexedFile, ...]
    numbers: NDArray[np.int64]  # [N] line or row in its file, counted from 1
    offsets: NDArray[np.int64]  # [N] where the line begins, bytes; the row's place in a Parquet file
    uids: NDArray[np.uint8]  # [N, 10]

    def __len__(self) -> int:
        return len(self.numbers)

    def uid(self, place: int) -> str:
        return bytes(self.uids[place]).hex()

    def file_of(self, place: int) -> int:
        """Return which of the files holds the row of a place."""
        return bisect_right(self._ends, place)

    @property
    def rows_by_entry(self) -> list[int]:
        """How many rows each entry of data.train has."""
        counts = [0] * (max((file.entry for file in self.files), default=-1) + 1)
        for file in self.files:
            counts[file.entry] += file.num_rows
        return counts

    def digest(self) -> str:
        """Return a hash over all uids in their order: what two starts of a run must agree on."""
        text = self.uids.tobytes().hex()
        width, digest = 2 * UID_BYTES, hashlib.sha256()
        for first in range(0, len(text), width):
            digest.update((b"\n" if first else b"") + text[first : first + width].encode())
        return digest.hexdigest()

    def places(self, uids: Sequence[str]) -> dict[str, int]:
        """Return the place of each of these uids that is here."""
        wanted = np.frombuffer(bytes.fromhex("".join(uids)), np.uint8).reshape(-1, UID_BYTES)
        mine, theirs = _as_items(self.uids), _as_items(wanted)
        found = np.flatnonzero(np.isin(mine, theirs))
        return {self.uid(place): int(place) for place in found}

    def is_of(self, said: str) -> bool:
        """Return whether the settings say the same, and the files are as they were when this was made."""
        return said == self.said and all(file.is_unchanged() for file in self.files)

    def save(self, path: Path) -> None:
        """Write this to a file, in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"said": self.said, "files": [asdict(file) for file in self.files]}
        with replacing(path) as aside, aside.open("wb") as file:
            np.savez(
                file,
                about=np.frombuffer(json.dumps(about).encode(), np.uint8),
                numbers=self.numbers,
                offsets=self.offsets,
                uids=self.uids,
            )

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(file.num_rows for file in self.files))


def load_index(path: Path) -> PromptIndex:
    """Return what `save` wrote. Raises: OSError, TypeError, ValueError or KeyError for a file that is another's."""
    with np.load(path, allow_pickle=False) as content:
        about = json.loads(content["about"].tobytes())
        files = tuple(IndexedFile(**file) for file in about["files"])
        return PromptIndex(about["said"], files, content["numbers"], content["offsets"], content["uids"])


class IndexBuilder:
    """Collects rows, file by file and in each file's order."""

    def __init__(self, said: str) -> None:
        self._said = said
        self._files: list[IndexedFile] = []
        self._begins: list[int] = []
        self._numbers = array("q")
        self._offsets = array("q")
        self._uids = bytearray()

    def begin(self, file: RowFile) -> None:
        """Take the rows that follow for this file's."""
        found = file.path.stat()
        self._files.append(
            IndexedFile(str(file.path), file.name, file.entry, 0, size=found.st_size, mtime_ns=found.st_mtime_ns)
        )
        self._begins.append(len(self._numbers))

    def add(self, number: int, offset: int, uid: str) -> int:
        """Return the place of the row that this adds."""
        self._numbers.append(number)
        self._offsets.append(offset)
        self._uids += bytes.fromhex(uid)
        return len(self._numbers) - 1

    def finish(self, without: Collection[int]) -> PromptIndex:
        """Return the index, less the rows of these places."""
        numbers = np.frombuffer(self._numbers, np.int64)
        offsets = np.frombuffer(self._offsets, np.int64)
        uids = np.frombuffer(bytes(self._uids), np.uint8).reshape(-1, UID_BYTES)
        kept = np.ones(len(numbers), np.bool_)
        kept[np.fromiter(without, np.int64, len(without))] = False
        ends = [*self._begins[1:], len(numbers)]
        files = tuple(
            IndexedFile(**(asdict(file) | {"num_rows": int(kept[begin:end].sum())}))
            for file, begin, end in zip(self._files, self._begins, ends, strict=True)
        )
        return PromptIndex(self._said, files, numbers[kept], offsets[kept], uids[kept])


def _as_items(uids: NDArray[np.uint8]) -> NDArray[np.void]:
    """Return each row of bytes as one comparable item."""
    return np.ascontiguousarray(uids).view(np.dtype((np.void, UID_BYTES))).ravel()
