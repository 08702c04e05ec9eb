"""Times of a Parquet file as Python can hold them: pandas writes nanoseconds, Python's times have microseconds."""

from typing import TypeVar

import pyarrow

Columns = TypeVar("Columns", pyarrow.RecordBatch, pyarrow.Table)


def in_microseconds(columns: Columns) -> Columns:
    """Return the same columns, their times cut to whole microseconds, inside lists and structs too."""
    schema = pyarrow.schema([field.with_type(_readable(field.type)) for field in columns.schema])
    return columns if schema.equals(columns.schema) else columns.cast(schema, safe=False)


def _readable(kind: pyarrow.DataType) -> pyarrow.DataType:
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
