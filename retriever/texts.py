"""Texts in two memory-mapped files: a corpus need not fit into memory."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray


class Texts(Sequence[str]):
    """A sequence of texts; threads may share it. Open files stay readable after their folder is deleted."""

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self._data = data  # [bytes] UTF-8 of all texts, concatenated
        self._ends = ends  # [texts] where each text ends in `data`

    @classmethod
    def open(cls, folder: Path, name: str) -> "Texts":
        """Return the texts that a `TextsWriter` wrote. Raises: OSError or ValueError for damaged files."""
        ends = np.load(folder / f"{name}.ends.npy", mmap_mode="r", allow_pickle=False)
        path = folder / f"{name}.utf8"
        # An empty file cannot be mapped.
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        return cls(data, ends)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        start = int(self._ends[row - 1]) if row else 0
        return self._data[start : int(self._ends[row])].tobytes().decode()


class TextsWriter:
    """Writes texts to `NAME.utf8` and `NAME.ends.npy` . Call `append` for each text, then `close`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ends = array("q")
        self._ends_path = folder / f"{name}.ends.npy"
        self._file = (folder / f"{name}.utf8").open("wb")

    def append(self, text: str) -> None:
        self._file.write(text.encode())
        self._ends.append(self._file.tell())

    def close(self) -> None:
        self._file.close()
        np.save(self._ends_path, np.frombuffer(self._ends, np.int64) if self._ends else np.empty(0, np.int64))
