"""Where each prompt of a data set lies and what it is called: read once, small, and shared with other processes.

A million rows take 26 MB; their texts stay in the file.
"""

import hashlib
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_UID_BYTES = 10


@dataclass(frozen=True)
class PromptIndex:
    """The rows of one file that are trained on, in file order. N rows."""

    size: int  # of the file, bytes
    mtime_ns: int  # of the file
    numbers: NDArray[np.int64]  # [N] line or row in the file, counted from 1
    offsets: NDArray[np.int64]  # [N] where the line begins, bytes; the row's place in a Parquet file
    uids: NDArray[np.uint8]  # [N, 10]

    def __len__(self) -> int:
        return len(self.numbers)

    def uid(self, place: int) -> str:
        return bytes(self.uids[place]).hex()

    def digest(self) -> str:
        """Return a hash over all uids in their order: what two starts of a run must agree on."""
        text = self.uids.tobytes().hex()
        width, digest = 2 * _UID_BYTES, hashlib.sha256()
        for first in range(0, len(text), width):
            digest.update((b"\n" if first else b"") + text[first : first + width].encode())
        return digest.hexdigest()

    def places(self, uids: Sequence[str]) -> dict[str, int]:
        """Return the place of each of these uids that is here."""
        wanted = np.frombuffer(bytes.fromhex("".join(uids)), np.uint8).reshape(-1, _UID_BYTES)
        mine, theirs = _as_items(self.uids), _as_items(wanted)
        found = np.flatnonzero(np.isin(mine, theirs))
        return {self.uid(place): int(place) for place in found}

    def is_of(self, file: Path) -> bool:
        """Return whether the file is as it was when this was made, as far as its size and time tell."""
        found = file.stat()
        return (found.st_size, found.st_mtime_ns) == (self.size, self.mtime_ns)

    def save(self, path: Path) -> None:
        """Write this to a file, in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}")
        with aside.open("wb") as file:
            np.savez(
                file,
                about=np.array([self.size, self.mtime_ns], np.int64),
                numbers=self.numbers,
                offsets=self.offsets,
                uids=self.uids,
            )
        os.replace(aside, path)


def load_index(path: Path) -> PromptIndex:
    """Return what `save` wrote. Raises: OSError, ValueError or KeyError for a file that is missing or another's."""
    with np.load(path, allow_pickle=False) as content:
        size, mtime_ns = (int(value) for value in content["about"])
        return PromptIndex(size, mtime_ns, content["numbers"], content["offsets"], content["uids"])


class IndexBuilder:
    """Collects rows in file order."""

    def __init__(self, file: Path) -> None:
        found = file.stat()
        self._size, self._mtime_ns = found.st_size, found.st_mtime_ns
        self._numbers = array("q")
        self._offsets = array("q")
        self._uids = bytearray()

    def add(self, number: int, offset: int, uid: str) -> None:
        self._numbers.append(number)
        self._offsets.append(offset)
        self._uids += bytes.fromhex(uid)

    def finish(self, without: Sequence[int]) -> PromptIndex:
        """Return the index, less the rows of these numbers."""
        numbers = np.frombuffer(self._numbers, np.int64)
        offsets = np.frombuffer(self._offsets, np.int64)
        uids = np.frombuffer(bytes(self._uids), np.uint8).reshape(-1, _UID_BYTES)
        kept = ~np.isin(numbers, np.array(without, np.int64))
        return PromptIndex(self._size, self._mtime_ns, numbers[kept], offsets[kept], uids[kept])


def _as_items(uids: NDArray[np.uint8]) -> NDArray[np.void]:
    """Return each row of bytes as one comparable item."""
    return np.ascontiguousarray(uids).view(np.dtype((np.void, _UID_BYTES))).ravel()
