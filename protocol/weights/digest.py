"""Digests of weights: one of each parameter, computed on its device, and one of all.

A parameter's bytes are R rows of ROW_BYTES signed bytes. Each row times a fixed matrix of small integers gives NUM_SUMS
sums, exact in 32 bits. The rows' sums, each times its row's fixed odd number, are added modulo 2**64. The result is the
same on every device. The digest guards against faults, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from protocol.weights.wire import Bucket, bucket_views, cut_into_runs

if TYPE_CHECKING:
    from torch import Tensor, device

ROW_BYTES = 4096  # 128 * 63 * 4096 < 2**25: a row's sums fit 32 bits
NUM_SUMS = 16
_MIN_ROWS = 32  # matrix units want more than 16 rows
_ALIGNMENT_BYTES = 16  # required by a GPU's matrix units
_PART_ROWS = 1 << 14  # rows at once, 64 MiB
_CPU_PART_ROWS = 1 << 10  # rows at once on a CPU, 4 MiB: they fit its cache
_SMALL_ROWS = 64  # largest parameters that are summed together
_TOGETHER_ROWS = 1 << 11  # rows of small parameters at once, 8 MiB


class WeightDigest:
    """Digests of a push's parameters, bucket by bucket.

    It covers names, types, shapes and bytes, not buckets and order: a model file has the same digest.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._left: Iterator[Bucket] = iter(buckets)
        self._found: list[tuple[str, str, tuple[int, ...], Tensor]] = []

    def add(self, flat: Tensor) -> None:
        """Add the next bucket, a contiguous uint8 tensor, without waiting for its device."""
        bucket = next(self._left)
        sums = sums_of_all([tensor for _, tensor in bucket_views(flat, bucket)])
        for meta, found in zip(bucket, sums, strict=True):
            self._found.append((meta.name, meta.dtype, meta.shape, found))

    def by_name(self) -> dict[str, str]:
        """Return each parameter's digest, 32 hexadecimal digits; waits for the device."""
        return {name: digest_of_sums(name, dtype, shape, sums) for name, dtype, shape, sums in self._found}

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
    head = msgspec.msgpack.encode([name, dtype, list(shape)])
    return str(blake3(head + sums.cpu().numpy().astype("<i8").tobytes()).hexdigest(16))


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


def sums_of_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `byte_sums` of each contiguous tensor. Small ones are summed together, which saves calls."""
    found: dict[int, Tensor] = {}
    small: list[int] = []
    for number, tensor in enumerate(tensors):
        if _num_rows(tensor) <= _SMALL_ROWS:
            small.append(number)
        else:
            found[number] = byte_sums(tensor)
    for run in cut_into_runs(small, lambda number: _num_rows(tensors[number]), _TOGETHER_ROWS):
        found |= zip(run, _sums_together([tensors[number] for number in run]), strict=True)
    return [found[number] for number in range(len(tensors))]


def _sums_together(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sums of parameters on one device, int64 [parameters, NUM_SUMS]."""
    import torch

    lengths = [_num_rows(tensor) for tensor in tensors]
    numbers = [number for length in lengths for number in range(length)]
    owners = [owner for owner, length in enumerate(lengths) for _ in range(length)]
    num_missing = max(0, _MIN_ROWS - len(numbers))  # rows of zeros
    data = [tensor.detach().reshape(-1).view(torch.uint8).view(torch.int8) for tensor in tensors]
    whole = [torch.nn.functional.pad(each, (0, gap)) if (gap := -len(each) % ROW_BYTES) else each for each in data]
    rows = torch.nn.functional.pad(torch.cat(whole).view(-1, ROW_BYTES), (0, 0, 0, num_missing))
    place = rows.device
    factors = _mix(_integers(numbers + [0] * num_missing)).to(place)
    products = torch._int_mm(rows, _matrix(place)) * factors.unsqueeze(1)
    total = torch.zeros(len(tensors), NUM_SUMS, dtype=torch.int64, device=place)
    return total.index_add_(0, _integers(owners + [0] * num_missing).to(place), products)


def _integers(values: Sequence[int]) -> Tensor:
    import torch

    return torch.tensor(values, dtype=torch.int64)


def _num_rows(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ROW_BYTES)


def _sums_from_row(data: Tensor, first_row: int) -> Tensor:
    """Return the sums of int8 bytes from row `first_row` on."""
    import torch

    num_body_bytes = len(data) - len(data) % (_MIN_ROWS * ROW_BYTES)
    body, tail = torch.split(data, [num_body_bytes, len(data) - num_body_bytes])
    total = torch.zeros(NUM_SUMS, dtype=torch.int64, device=data.device)
    num_rows = first_row
    part_rows = _CPU_PART_ROWS if data.device.type == "cpu" else _PART_ROWS
    for rows in torch.split(body.view(-1, ROW_BYTES), part_rows) if num_body_bytes else ():
        total += _sums_of_rows(rows, num_rows)
        num_rows += len(rows)
    if len(tail):
        padded = torch.nn.functional.pad(tail, (0, _MIN_ROWS * ROW_BYTES - len(tail)))
        total += _sums_of_rows(padded.view(-1, ROW_BYTES), num_rows)
    return total


def _sums_of_rows(rows: Tensor, first: int) -> Tensor:
    """Return the sums of rows [R, ROW_BYTES], whose first has number `first` in its parameter."""
    import torch

    factors = _mix(torch.arange(first, first + len(rows), device=rows.device))
    if rows.storage_offset() % _ALIGNMENT_BYTES:
        rows = rows.clone()
    return (torch._int_mm(rows, _matrix(rows.device)) * factors.unsqueeze(1)).sum(dim=0)


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
    """
    import torch

    drawn = _shift_right(_mix(torch.arange(ROW_BYTES * NUM_SUMS) + (1 << 40)), 40) % 126  # 0 to 125
    entries = torch.where(drawn < 63, drawn - 63, drawn - 62)
    return entries.to(torch.int8).view(ROW_BYTES, NUM_SUMS).to(place)
