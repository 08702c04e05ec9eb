"""Gathered tensors as the flat buckets of the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from protocol.weights.wire import Bucket, bucket_num_bytes, bucket_views

if TYPE_CHECKING:
    from torch import Tensor


def pack(plan: Sequence[Bucket], gathered: Iterator[Sequence[tuple[str, Tensor]]], device: str) -> Iterator[Tensor]:
    """Yield each planned bucket as flat bytes, as soon as its tensors were gathered."""
    import torch

    for bucket in plan:
        tensors = next(gathered, ())
        given = [(name, tuple(tensor.shape)) for name, tensor in tensors]
        planned = [(meta.name, tuple(meta.shape)) for meta in bucket]
        if given != planned:
            raise ValueError(f"weight push: the plan has {planned} where the bucket has {given}")
        flat = torch.zeros(bucket_num_bytes(bucket), dtype=torch.uint8, device=device)
        for (_, view), (_, tensor) in zip(bucket_views(flat, bucket), tensors, strict=True):
            view.copy_(tensor.detach())
        yield flat
    surplus = next(gathered, None)
    if surplus is not None:
        raise ValueError(f"weight push: a bucket of {[name for name, _ in surplus]} is not in the plan")


def device_of(backend: str) -> str:
    """Return where buckets lie. Over ipc that is where the servers' weights are, which copy from there."""
    import torch

    return "cuda" if backend == "nccl" or (backend == "ipc" and torch.cuda.is_available()) else "cpu"
