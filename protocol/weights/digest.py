"""Digests of weights: one of each parameter, computed on its device, and one of all.

A parameter's bytes are R rows of ROW_BYTES signed bytes. Each row times a fixed matrix of small integers gives NUM_SUMS
sums, exact in 32 bits. The rows' sums, each times its row's fixed odd number, are added modulo 2**64. The result is the
same on every device. The digest guards against faults, not against an adversary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from protocol.weights.wire import ROW_BYTES, Bucket, TensorMeta

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, device

NUM_SUMS = 16  # 128 * 63 * ROW_BYTES < 2**25: a row's sums fit 32 bits
_MIN_ROWS = 32  # matrix units want more than 16 rows
_ALIGNMENT_BYTES = 16  # required by a GPU's matrix units
_PART_ROWS = 1 << 14  # rows at once, 64 MiB
_CPU_PART_ROWS = 1 << 10  # rows at once on a CPU, 4 MiB: they fit its cache
_log = logging.getLogger(__name__)


class WeightDigest:
    """Digests of a push's parameters, bucket by bucket.

    It covers names, types, shapes and bytes, not buckets and order: a model file has the same digest.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._left: Iterator[Bucket] = iter(buckets)
        self._sums: list[tuple[Bucket, Tensor]] = []

    def add(self, flat: Tensor) -> None:
        """Add the next bucket, a contiguous uint8 tensor with zeros in its gaps, without waiting for its device."""
        bucket = next(self._left)
        self._sums.append((bucket, bucket_sums(flat, bucket)))

    def by_name(self) -> dict[str, str]:
        """Return each parameter's digest, 32 hexadecimal digits; waits for the device."""
        return {
            meta.name: _digest(meta.head, sums)
            for bucket, all_sums in self._sums
            for meta, sums in zip(bucket, all_sums.cpu().numpy(), strict=True)
        }

    def hexdigest(self) -> str:
        """Return the digest of all added parameters; waits for the device."""
        return digest_of_all(self.by_name())


def digest_of_all(by_name: Mapping[str, str]) -> str:
    """Return one digest of parameters' digests, independent of their order."""
    return blake3(msgspec.msgpack.encode(sorted(by_name.items()))).hexdigest()


def digest_of_tensor(name: str, tensor: Tensor) -> str:
    """Return a parameter's digest, 32 hexadecimal digits; waits for the device."""
    return digest_of_sums(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), byte_sums(tensor))


def digest_of_sums(name: str, dtype: str, shape: tuple[int, ...], sums: Tensor) -> str:
    """Return a parameter's digest from its sums. dtype: torch's name without the module."""
    return _digest(TensorMeta(name, dtype, shape).head, sums.cpu().numpy())


def _digest(head: bytes, sums: NDArray[np.int64]) -> str:
    return str(blake3(head + sums.astype("<i8", copy=False).tobytes()).hexdigest(16))


def byte_sums(tensor: Tensor, first_byte: int = 0) -> Tensor:
    """Return the sums of a contiguous tensor's bytes, int64 [NUM_SUMS], on its device.

    A single changed byte changes all sums; other changes cancel in all sums with a chance below 1 in 2**38.
    first_byte: offset of the tensor in its parameter. The sums of shards add up, modulo 2**64, to those of the whole.
    """
    import torch

    data = tensor.detach().reshape(-1).view(torch.uint8).view(torch.int8)
    row, begun_bytes = divmod(first_byte, ROW_BYTES)
    if not begun_bytes:
        return _sums_from_row(data, row)
    rest_of_row, data = data[: ROW_BYTES - begun_bytes], data[ROW_BYTES - begun_bytes :]
    first = torch.nn.functional.pad(rest_of_row, (begun_bytes, 0))
    return _sums_from_row(first, row) + _sums_from_row(data, row + 1)


def bucket_sums(flat: Tensor, bucket: Bucket) -> Tensor:
    """Return `byte_sums` of each tensor of a bucket, int64 [tensors, NUM_SUMS], in calls that all tensors share."""
    import torch

    place = flat.device
    lengths = [meta.num_rows for meta in bucket]
    firsts = _on_device([0, *accumulate(lengths)][:-1], place)
    every = torch.arange(len(bucket), device=place)
    owners = torch.repeat_interleave(every, _on_device(lengths, place), output_size=sum(lengths))
    numbers = torch.arange(sum(lengths), device=place) - firsts[owners]
    total = torch.zeros(len(bucket), NUM_SUMS, dtype=torch.int64, device=place)
    first = 0
    for rows in torch.split(flat.view(torch.int8).view(-1, ROW_BYTES), _part_rows(place)):
        part = slice(first, first + len(rows))
        total.index_add_(0, owners[part], _products(rows, numbers[part]))
        first += len(rows)
    return total


def _on_device(values: Sequence[int], place: device) -> Tensor:
    """Return int64 values on the device, without waiting for it."""
    import torch

    found = torch.tensor(values, dtype=torch.int64)
    return found.pin_memory().to(place, non_blocking=True) if place.type == "cuda" else found.to(place)


def _part_rows(place: device) -> int:
    return _CPU_PART_ROWS if place.type == "cpu" else _PART_ROWS


def _sums_from_row(data: Tensor, first_row: int) -> Tensor:
    """Return the sums of int8 bytes from row `first_row` on."""
    import torch

    place = data.device
    body, tail = torch.split(data, [len(data) - len(data) % ROW_BYTES, len(data) % ROW_BYTES])
    total = torch.zeros(NUM_SUMS, dtype=torch.int64, device=place)
    first = first_row
    for rows in torch.split(body.view(-1, ROW_BYTES), _part_rows(place)):
        total += _products(rows, torch.arange(first, first + len(rows), device=place)).sum(dim=0)
        first += len(rows)
    if len(tail):
        padded = torch.nn.functional.pad(tail, (0, ROW_BYTES - len(tail)))
        total += _products(padded.view(1, ROW_BYTES), torch.arange(first, first + 1, device=place)).sum(dim=0)
    return total


def _products(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return each row's sums times its factor, int64 [R, NUM_SUMS].

    rows: int8 [R, ROW_BYTES]. numbers: int64 [R], each row's place in its parameter.
    """
    import torch

    num_whole = len(rows)
    if num_whole < _MIN_ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, _MIN_ROWS - num_whole))
    if rows.storage_offset() % _ALIGNMENT_BYTES:
        rows = rows.clone()
    return exact_product(rows.device)(rows)[:num_whole] * _mix(numbers).unsqueeze(1)


@cache
def exact_product(place: device) -> Callable[[Tensor], Tensor]:
    """Return the product of int8 rows [R, ROW_BYTES] and the fixed matrix, [R, NUM_SUMS], that is exact on this device.

    A GPU's int8 units are tried once, since libraries support some layouts on some GPUs only.
    """
    if place.type != "cuda" or is_exact(int8_product, place):
        return int8_product
    _log.warning('weight digest: no exact int8 product  device=%s consequence="it computes in float64, slower"', place)
    return float64_product


def is_exact(product: Callable[[Tensor], Tensor], place: device) -> bool:
    """Return whether the product of known rows, in a small and in a large call, is that of whole numbers."""
    import torch

    block = torch.arange(_MIN_ROWS * ROW_BYTES).mul(0x9E3779B1).bitwise_right_shift(7).to(torch.int8)
    block = block.view(_MIN_ROWS, ROW_BYTES)
    matrix = _matrix(torch.device("cpu"))
    block[:NUM_SUMS] = torch.where(matrix.t() > 0, 127, -128)  # the largest sum of each column
    expected = block.long() @ matrix.long()
    try:
        return all(
            torch.equal(product(block.to(place).repeat(times, 1)).cpu().long(), expected.repeat(times, 1))
            for times in (1, _PART_ROWS // _MIN_ROWS)
        )
    except RuntimeError:
        return False


def int8_product(rows: Tensor) -> Tensor:
    """Return the product from integer matrix units, int32."""
    import torch

    return torch._int_mm(rows, _matrix(rows.device))


def float64_product(rows: Tensor) -> Tensor:
    """Return the product in float64, which holds every sum exactly, as int64."""
    import torch

    matrix = _matrix(rows.device).double()
    return torch.cat([(part.double() @ matrix).long() for part in torch.split(rows, 1 << 11)])


def _mix(numbers: Tensor) -> Tensor:
    """Return a fixed odd int64 for each number; products wrap around.

    Source: SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    mixed = (numbers + 1) * _as_signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shift_right(mixed, 30)) * _as_signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _as_signed(0x94D049BB133111EB)
    return (mixed ^ _shift_right(mixed, 31)) | 1


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    """Return 64-bit numbers shifted right and filled with zeros: torch's shift repeats the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _as_signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


@cache
def _matrix(place: device) -> Tensor:
    """Return the fixed matrix, int8 [ROW_BYTES, NUM_SUMS], of -63 to 63 without 0, so that every byte counts.

    CPUs without VNNI add two products in 16 bits: at most 2 * 255 * 63.
    Columns are contiguous, which cuBLAS needs for int8.
    """
    import torch

    drawn = _shift_right(_mix(torch.arange(ROW_BYTES * NUM_SUMS) + (1 << 40)), 40) % 126  # 0 to 125
    entries = torch.where(drawn < 63, drawn - 63, drawn - 62)
    return entries.to(torch.int8).view(ROW_BYTES, NUM_SUMS).t().contiguous().to(place).t()
