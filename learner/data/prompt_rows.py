"""Rows of a data set's files, in order or one by one: JSONL by line and byte, Parquet by row."""

import json
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import msgspec
import pyarrow
import pyarrow.parquet

from protocol.errors import OperatorError, SettingsError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ROWS_AT_ONCE = 1024
_CHUNK_BYTES = 1 << 14
_OTHER_FORMS = {
    b"\x1f\x8b": "is packed with gzip",
    b"\x28\xb5\x2f\xfd": "is packed with zstd",
    b"PK\x03\x04": "is packed with zip",
    b"PAR1": "is a Parquet file that is not called .parquet",
    b"\xff\xfe": "is UTF-16",
    b"\xfe\xff": "is UTF-16",
    b"[": "is one JSON list",
    b"version https://git-lfs": "is a pointer of Git LFS, and its content was not fetched",
}
_OF_CHATS = {
    *("messages", "conversations", "prompt", "completion", "response", "chosen", "rejected", "rejected_messages"),
    "tools",
}  # columns whose lists and maps are parts of chats, besides those that hold messages
_decode = msgspec.json.Decoder().decode


class Row(NamedTuple):
    """One row of a file."""

    number: int  # line or row, from 1
    offset: int  # position for `RowReader.read`
    content: dict[str, Any]  # column -> value
    max_depth: int | None = None  # bound of the nesting of lists and maps, `content` included; None: unknown


class RowReader(Protocol):
    """Random access to the rows of one file."""

    def read(self, number: int, offset: int) -> dict[str, Any]:
        """Return the content of a row. Raises: OperatorError when the file has changed."""


def each_row(file: Path) -> Iterator[Row]:
    """Yield every row of a file in order, without blank lines.

    Raises: SettingsError for an unreadable file, and with the line number for a line that is not a JSON object.
    """
    return _parquet_rows(file) if is_parquet(file) else _jsonl_rows(file)


def is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


def open_rows(file: Path) -> RowReader:
    """Return a reader of the file. A file that replaces it later has no effect."""
    return _ParquetReader(file) if is_parquet(file) else _JsonlReader(file)


def _jsonl_rows(file: Path) -> Iterator[Row]:
    offset = 0
    with _open_file(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                # Brackets inside texts count as well, so this is an upper bound.
                yield Row(number, offset, _parse(line, file, number), line.count(b"{") + line.count(b"["))
            offset += len(line)


def _open_file(file: Path) -> BinaryIO:
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
        # Python's reader also accepts values such as NaN, and gives the place of an error.
        row = _parse_in_python(line, file, number)
    if not isinstance(row, dict):
        if number == 1 and isinstance(row, list):
            raise SettingsError(f"data: {file} is one JSON list. Give JSONL, one object on each line, or Parquet.")
        raise SettingsError(f"data: {file} line {number} is a {type(row).__name__}, expected an object.")
    return row


def _parse_in_python(line: bytes, file: Path, number: int) -> Any:
    if number == 1 and (form := _other_form(line)) is not None:
        raise SettingsError(f"data: {file} {form}. Give JSONL, one object on each line, or Parquet.")
    try:
        return json.loads(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise SettingsError(f"data: {file} line {number} is not UTF-8: {error.reason}.") from None
    except json.JSONDecodeError as error:
        cure = " Give JSONL, one object on each line, or Parquet." if number == 1 else ""
        raise SettingsError(
            f"data: {file} line {number} is not JSON: {error.msg} at column {error.colno}.{cure}"
        ) from None
    except RecursionError:
        raise SettingsError(f"data: {file} line {number} is nested too deeply. Flatten the row.") from None


def _other_form(line: bytes) -> str | None:
    """Return a description of a file that is not JSONL, from its first bytes; None when they are unknown."""
    for magic, form in _OTHER_FORMS.items():
        if line.startswith(magic):
            return form
    return None


def _parquet_rows(file: Path) -> Iterator[Row]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _check_columns(table.schema_arrow.names, file)
            for batch in table.iter_batches(_ROWS_AT_ONCE):
                for content in _contents(in_microseconds(batch), file, number):
                    number += 1
                    yield Row(number, number - 1, content)
    except (pyarrow.ArrowException, OSError) as error:
        raise SettingsError(f"data: {file} is not a Parquet file: {error}") from None


def _check_columns(names: Sequence[str], file: Path) -> None:
    """Raise SettingsError for two columns of one name: a row could hold only one of the two."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"data: {file} has two columns {twice[0]!r}. Rename or remove one of them.")


def _contents(batch: pyarrow.RecordBatch, file: Path, num_before: int) -> list[dict[str, Any]]:
    """Return a batch's rows. num_before: number of earlier rows in the file. Raises: SettingsError naming the row."""
    try:
        return _as_rows(batch)
    except (ValueError, OverflowError):
        for place in range(len(batch)):
            try:
                _as_rows(batch.slice(place, 1))
            except (ValueError, OverflowError) as error:
                raise SettingsError(f"data: {file} row {num_before + place + 1} cannot be read: {error}.") from None
        raise


def _as_rows(batch: pyarrow.RecordBatch | pyarrow.Table) -> list[dict[str, Any]]:
    """Return the rows. Parquet gives each message, call and tool the keys of all others: empty ones are dropped."""
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows:
        row |= {name: _without_empty(each) for name, each in row.items() if name in _OF_CHATS or _are_messages(each)}
    return rows


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and "role" in each for each in value)


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_empty(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_empty(each) for key, each in value.items() if each is not None}
    return value


class _JsonlReader:
    """Reads a line at its offset."""

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
    """Reads a row from the columns, which it keeps in memory in Arrow's form.

    A row group has up to a million rows, and reading one row from the file would decompress the whole group.
    """

    def __init__(self, file: Path) -> None:
        # `read_table` would read a folder name such as split=train as a column.
        with pyarrow.parquet.ParquetFile(file) as table:
            self._table = in_microseconds(table.read())

    def read(self, number: int, offset: int) -> dict[str, Any]:
        (row,) = _as_rows(self._table.slice(offset, 1))
        return row


_Columns = TypeVar("_Columns", pyarrow.RecordBatch, pyarrow.Table)


def in_microseconds(columns: _Columns) -> _Columns:
    """Return the columns with nanosecond times, as pandas writes them, truncated to microseconds.

    Python's types of times have no nanoseconds.
    """
    schema = pyarrow.schema([field.with_type(_readable(field.type)) for field in columns.schema])
    return columns if schema.equals(columns.schema) else columns.cast(schema, safe=False)


def _readable(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return the type with microseconds for nanoseconds, also inside lists and structs."""
    if pyarrow.types.is_timestamp(kind) and kind.unit == "ns":
        return pyarrow.timestamp("us", kind.tz)
    if pyarrow.types.is_duration(kind) and kind.unit == "ns":
        return pyarrow.duration("us")
    if pyarrow.types.is_time64(kind) and kind.unit == "ns":
        return pyarrow.time64("us")
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_readable(kind.value_type)))
    if pyarrow.types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(_readable(kind.value_type)))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_readable(field.type)) for field in kind])
    return kind
