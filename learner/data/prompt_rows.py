"""Rows of a data set as they lie in its file: JSONL by line and byte, Parquet by row."""

import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec
import pyarrow
import pyarrow.parquet

from protocol.errors import OperatorError, SettingsError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ROWS_AT_ONCE = 1024
_CHUNK_BYTES = 1 << 14
_decode = msgspec.json.Decoder().decode


class Row(NamedTuple):
    """One row of a file."""

    number: int  # line or row, counted from 1
    offset: int  # what `RowReader.read` finds it by
    content: dict[str, Any]  # column -> value


class RowReader(Protocol):
    """Rows of one file, read one by one in any order."""

    def read(self, number: int, offset: int) -> dict[str, Any]:
        """Return the content of a row that `each_row` gave. Raises: OperatorError when it is there no more."""


def each_row(file: Path) -> Iterator[Row]:
    """Yield every row of a file, in its order; blank lines are none.

    Raises: SettingsError for a file that cannot be read, and for a line that is no JSON object, by its number.
    """
    return _parquet_rows(file) if file.suffix == ".parquet" else _jsonl_rows(file)


def open_rows(file: Path) -> RowReader:
    """Return a reader of the file as it is now: one that is put in its place later changes nothing."""
    return _ParquetReader(file) if file.suffix == ".parquet" else _JsonlReader(file)


def _jsonl_rows(file: Path) -> Iterator[Row]:
    offset = 0
    with _opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                yield Row(number, offset, _parse(line, file, number))
            offset += len(line)


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise SettingsError(f"data: {file} cannot be read: {error.strerror}.") from None


def _parse(line: bytes, file: Path, number: int) -> dict[str, Any]:
    if number == 1:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    try:
        row = _decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        # What is no JSON, and what Python's reader takes besides, NaN for one: it says which, and where.
        row = _parse_slowly(line, file, number)
    if not isinstance(row, dict):
        raise SettingsError(f"data: {file} line {number} is a {type(row).__name__}, expected an object.")
    return row


def _parse_slowly(line: bytes, file: Path, number: int) -> Any:
    try:
        return json.loads(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise SettingsError(f"data: {file} line {number} is not UTF-8: {error.reason}.") from None
    except json.JSONDecodeError as error:
        raise SettingsError(f"data: {file} line {number} is not JSON: {error.msg} at column {error.colno}.") from None
    except RecursionError:
        raise SettingsError(f"data: {file} line {number} nests too deep to be read.") from None


def _parquet_rows(file: Path) -> Iterator[Row]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(_ROWS_AT_ONCE):
                for content in batch.to_pylist():
                    number += 1
                    yield Row(number, number - 1, content)
    except (pyarrow.ArrowException, OSError) as error:
        raise SettingsError(f"data: {file} is not a Parquet file: {error}") from None


class _JsonlReader:
    """Reads lines where they begin."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, number: int, offset: int) -> dict[str, Any]:
        try:
            return _parse(self._line(offset), self._path, number)
        except SettingsError as error:
            raise OperatorError(f"{error} The file was changed while the run uses it.") from None

    def _line(self, offset: int) -> bytes:
        line = b""
        while chunk := os.pread(self._descriptor, _CHUNK_BYTES, offset + len(line)):
            until = chunk.find(b"\n") + 1
            if until:
                return line + chunk[:until]
            line += chunk
        return line


class _ParquetReader:
    """Keeps the columns in memory as Arrow has them, about as large as their texts: rows of a Parquet file lie in
    groups of up to a million, and each would have to be unpacked for one of its rows."""

    def __init__(self, file: Path) -> None:
        self._table = pyarrow.parquet.read_table(file)

    def read(self, number: int, offset: int) -> dict[str, Any]:
        (row,) = self._table.slice(offset, 1).to_pylist()
        content: dict[str, Any] = row
        return content
