"""Packs gathered tensors into the flat buckets of the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from protocol.weights.wire import Bucket, bucket_num_bytes, bucket_views

if TYPE_CHECKING:
    from torch import Tensor


class BucketMemory:
    """Reusable memory for the buckets of one push, each of the largest bucket's size.

    On a CPU, new memory costs several times as much as copying a bucket into it.
    """

    def __init__(self, plan: Sequence[Bucket], device: str) -> None:
        self._num_bytes = max(map(bucket_num_bytes, plan), default=0)
        self._device = device
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return a uint8 tensor of this length with undefined content."""
        import torch

        if not self._free:
            self._free.append(torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device))
        return self._free.pop()[:num_bytes]

    def give_back(self, flat: Tensor) -> None:
        """Return a tensor of `take` for reuse."""
        import torch

        whole = torch.empty(0, dtype=torch.uint8, device=flat.device)
        self._free.append(whole.set_(flat.untyped_storage()))


def wait_for_device(flat: Tensor) -> None:
    """Return when the device has done what this thread asked of it: another thread's stream may then read `flat`."""
    import torch

    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()


def pack(
    plan: Sequence[Bucket],
    gathered: Iterator[Iterable[tuple[str, Tensor]]],
    memory: BucketMemory,
    wait: Callable[[Tensor], None] = wait_for_device,
) -> Iterator[Tensor]:
    """Yield each planned bucket as flat bytes, once they are written. A bucket's tensors are taken after the previous
    bucket was copied.
    """
    for bucket in plan:
        flat = _pack_bucket(bucket, next(gathered, ()), memory)
        wait(flat)
        yield flat
    surplus = next(gathered, None)
    if surplus is not None:
        raise ValueError(f"weight push: a bucket of {[name for name, _ in surplus]} is not in the plan")


def device_of(backend: str) -> str:
    """Return the device of buckets. Over ipc it is the device of the servers' weights."""
    import torch

    return "cuda" if backend == "nccl" or (backend == "ipc" and torch.cuda.is_available()) else "cpu"


def default_bucket_bytes(backend: str) -> int:
    """Return the default bucket size: on a CPU it fits the cache, on a GPU it saturates one broadcast."""
    return (256 if device_of(backend) == "cuda" else 16) << 20


def _pack_bucket(bucket: Bucket, tensors: Iterable[tuple[str, Tensor]], memory: BucketMemory) -> Tensor:
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
    """Write zeros between the tensors, so that no earlier content of the memory is sent."""
    end = 0
    for meta in bucket:
        begin, end = end + meta.num_bytes, end + bucket_num_bytes((meta,))
        if begin < end:
            flat[begin:end] = 0
