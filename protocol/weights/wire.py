"""The byte format of a weight push.

A push is one metadata message (`update_message`), then flat uint8 buckets by broadcast in its order, then a commit with
the digest of all buckets. Torch is imported inside functions only: importing `protocol` must stay cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA_VERSION = 3
ROW_BYTES = 4096  # every tensor of a bucket starts at such a boundary: the digest reads rows; gaps hold zeros
MAX_TENSORS = 1_000_000
BUCKET_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}  # defaults: a CPU's cache; enough for one broadcast of a GPU

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


@dataclass(frozen=True)
class TensorMeta:
    """One tensor of the policy as it travels.

    Example: TensorMeta("lm_head.weight", "float32", (512, 128)).num_bytes == 262144
    """

    name: str  # parameter name in the Hugging Face model
    dtype: str  # torch's name without the module: a key of ITEM_BYTES
    shape: tuple[int, ...]  # shape of the whole parameter

    @cached_property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @cached_property
    def num_rows(self) -> int:
        """Number of rows of a bucket that the tensor takes."""
        return -(-self.num_bytes // ROW_BYTES)

    @cached_property
    def head(self) -> bytes:
        """Name, type and shape as bytes of its digest."""
        return msgspec.msgpack.encode([self.name, self.dtype, list(self.shape)])


Bucket = tuple[TensorMeta, ...]


def bucket_num_bytes(bucket: Bucket) -> int:
    """Return the length of the flat buffer that carries this bucket, padding included."""
    return ROW_BYTES * sum(meta.num_rows for meta in bucket)


def stacked_view(flat: Tensor, row: int, meta: TensorMeta, count: int) -> Tensor:
    """Return a view [count, *shape] of neighbours in a bucket. meta: of each of them. row: where the first starts."""
    import torch

    size = ROW_BYTES * meta.num_rows
    rows = flat[ROW_BYTES * row : ROW_BYTES * row + count * size].view(count, size)
    return rows[:, : meta.num_bytes].view(getattr(torch, meta.dtype)).view(count, *meta.shape)


def update_message(buckets: Sequence[Bucket]) -> dict[str, Any]:
    """Return the metadata message of a push: plain lists, ints and strings."""
    metas = [meta for bucket in buckets for meta in bucket]
    return {
        "schema": SCHEMA_VERSION,
        "names": [meta.name for meta in metas],
        "dtype_names": [meta.dtype for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
        "bucket_lengths": [len(bucket) for bucket in buckets],
    }


def read_update_message(message: Mapping[str, Any]) -> tuple[Bucket, ...]:
    """Return the buckets that `update_message` described.

    Raises: ValueError naming the field when the message is of another schema, inconsistent or out of bounds.
    """
    if message.get("schema") != SCHEMA_VERSION:
        raise ValueError(f"weight update: schema {message.get('schema')!r}, this process speaks {SCHEMA_VERSION}")
    fields = msgspec.convert(dict(message), _Update)
    num_tensors = len(fields.names)
    for name, length in (("dtype_names", len(fields.dtype_names)), ("shapes", len(fields.shapes))):
        if length != num_tensors:
            raise ValueError(f"weight update: {name} has {length} entries, names has {num_tensors}")
    if num_tensors > MAX_TENSORS or len(set(fields.names)) != num_tensors:
        raise ValueError(f"weight update: {num_tensors} names, expected at most {MAX_TENSORS}, each once")
    if sum(fields.bucket_lengths) != num_tensors or min(fields.bucket_lengths, default=1) < 1:
        raise ValueError(f"weight update: bucket_lengths {fields.bucket_lengths} do not cover {num_tensors} tensors")
    unknown = sorted(set(fields.dtype_names) - set(ITEM_BYTES))
    if unknown:
        raise ValueError(f"weight update: dtype_names {unknown}, expected some of {sorted(ITEM_BYTES)}")
    if any(size < 0 for shape in fields.shapes for size in shape):
        raise ValueError("weight update: shapes hold a negative size")
    tensors = zip(fields.names, fields.dtype_names, fields.shapes, strict=True)
    metas = [TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
    buckets, start = [], 0
    for length in fields.bucket_lengths:
        buckets.append(tuple(metas[start : start + length]))
        start += length
    return tuple(buckets)


class PlanReader:
    """Reads update messages. A repeated message gives the same buckets, which then keep their sizes."""

    def __init__(self) -> None:
        self._message: Mapping[str, Any] = {}
        self._plan: tuple[Bucket, ...] = ()

    def read(self, message: Mapping[str, Any]) -> tuple[Bucket, ...]:
        """Return the buckets. Raises: ValueError as `read_update_message`."""
        if message != self._message:
            self._plan = read_update_message(message)
            self._message = message
        return self._plan


class _Update(msgspec.Struct):
    schema: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_lengths: list[int]


T = TypeVar("T")


def cut_into_runs(items: Sequence[T], size_of: Callable[[T], int], limit: int) -> list[list[T]]:
    """Return the items in order, in runs with a total size of at most `limit`. A larger item gets its own run.

    Example: sizes 48, 48, 48 and 208 with a limit of 100 give [48, 48], [48], [208].
    """
    runs: list[list[T]] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if not runs or filled + size > limit:
            runs.append([])
            filled = 0
        runs[-1].append(item)
        filled += size
    return runs
