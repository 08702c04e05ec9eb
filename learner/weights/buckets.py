"""Gathered tensors as the flat buckets of the wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from protocol.weights.wire import Bucket, bucket_num_bytes, bucket_views

if TYPE_CHECKING:
    from torch import Tensor


class BucketMemory:
    """Memory for a push's buckets, each as large as the largest, which is used again once it is given back.

    Fresh memory costs a CPU several times what is then copied into it. Nothing is kept from push to push.
    """

    def __init__(self, plan: Sequence[Bucket], device: str) -> None:
        self._num_bytes = max(map(bucket_num_bytes, plan), default=0)
        self._device = device
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return so many bytes, uint8, with whatever they held before."""
        import torch

        if not self._free:
            self._free.append(torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device))
        return self._free.pop()[:num_bytes]

    def give_back(self, flat: Tensor) -> None:
        """Take back what `take` returned and nobody reads any more."""
        import torch

        whole = torch.empty(0, dtype=torch.uint8, device=flat.device)
        self._free.append(whole.set_(flat.untyped_storage()))


def pack(
    plan: Sequence[Bucket], gathered: Iterator[Iterable[tuple[str, Tensor]]], memory: BucketMemory
) -> Iterator[Tensor]:
    """Yield each planned bucket as flat bytes, as soon as its tensors were gathered; each is taken after the one before
    was copied.
    """
    for bucket in plan:
        yield _packed(bucket, next(gathered, ()), memory)
    surplus = next(gathered, None)
    if surplus is not None:
        raise ValueError(f"weight push: a bucket of {[name for name, _ in surplus]} is not in the plan")


def device_of(backend: str) -> str:
    """Return where buckets lie. Over ipc that is where the servers' weights are, which copy from there."""
    import torch

    return "cuda" if backend == "nccl" or (backend == "ipc" and torch.cuda.is_available()) else "cpu"


def default_bucket_bytes(backend: str) -> int:
    """Return the size of a bucket where no setting says it: on a CPU what its cache holds while it is sent and hashed,
    on a GPU what one broadcast moves at full speed.
    """
    return (256 if device_of(backend) == "cuda" else 16) << 20


def _packed(bucket: Bucket, tensors: Iterable[tuple[str, Tensor]], memory: BucketMemory) -> Tensor:
    flat = memory.take(bucket_num_bytes(bucket))
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
