"""Gathered tensors as the flat buckets of the wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from protocol.weights.wire import Bucket, bucket_num_bytes, bucket_views

if TYPE_CHECKING:
    from torch import Tensor


def pack(plan: Sequence[Bucket], gathered: Iterator[Iterable[tuple[str, Tensor]]], device: str) -> Iterator[Tensor]:
    """Yield each planned bucket as flat bytes, as soon as its tensors were gathered; each is taken after the one before
    was copied.
    """
    for bucket in plan:
        yield _packed(bucket, next(gathered, ()), device)
    surplus = next(gathered, None)
    if surplus is not None:
        raise ValueError(f"weight push: a bucket of {[name for name, _ in surplus]} is not in the plan")


def device_of(backend: str) -> str:
    """Return where buckets lie. Over ipc that is where the servers' weights are, which copy from there."""
    import torch

    return "cuda" if backend == "nccl" or (backend == "ipc" and torch.cuda.is_available()) else "cpu"


def _packed(bucket: Bucket, tensors: Iterable[tuple[str, Tensor]], device: str) -> Tensor:
    import torch

    flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8, device=device)
    _clear_gaps(flat, bucket)
    planned = [(meta.name, tuple(meta.shape)) for meta in bucket]
    views = [view for _, view in bucket_views(flat, bucket)]
    given = []
    for number, (name, tensor) in enumerate(tensors):
        given.append((name, tuple(tensor.shape)))
        if planned[number : number + 1] == given[-1:]:
            views[number].copy_(tensor.detach())
    if given != planned:
        raise ValueError(f"weight push: the plan has {planned} where the bucket has {given}")
    return flat


def _clear_gaps(flat: Tensor, bucket: Bucket) -> None:
    """Write zeros between the tensors: what the memory held before is nobody else's business."""
    end = 0
    for meta in bucket:
        begin, end = end + meta.num_bytes, end + bucket_num_bytes((meta,))
        if begin < end:
            flat[begin:end] = 0
