"""Packs gathered tensors into the flat buckets of the wire, and passes these to the links of a push.

Two buckets are in memory: the next one is put once every link has sent the previous one. A link is behind when it needs
`_PATIENCE_S` and `_TIMES` times as long as the fastest link for a bucket. Its buckets are then kept in memory, and the
other links continue, until it has caught up or failed.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from protocol.weights.wire import BUCKET_BYTES, ROW_BYTES, Bucket, TensorMeta, bucket_num_bytes, stacked_view

_PATIENCE_S = 0.5
_TIMES = 3.0


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
        if not self._free:
            self._free.append(torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device))
        return self._free.pop()[:num_bytes]

    def give_back(self, flat: Tensor) -> None:
        """Return a tensor of `take` for reuse."""
        whole = torch.empty(0, dtype=torch.uint8, device=flat.device)
        self._free.append(whole.set_(flat.untyped_storage()))


def wait_for_device(flat: Tensor) -> None:
    """Return when the device has done what this thread asked of it: another thread's stream may then read `flat`."""
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()


def pack(
    plan: Sequence[Bucket],
    gathered: Iterator[Iterable[tuple[str, Tensor]]],
    memory: BucketMemory,
    wait: Callable[[Tensor], None] = wait_for_device,
) -> Iterator[Tensor]:
    """Yield each planned bucket as flat bytes, once they are written.

    gathered: each bucket's tensors by name, taken after the previous bucket was copied. A tensor with one more
    dimension, [N, ...], is N neighbours of the plan, under the name of the first.
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
    return "cuda" if backend == "nccl" or (backend == "ipc" and torch.cuda.is_available()) else "cpu"


def default_bucket_bytes(backend: str) -> int:
    """Return the default bucket size on the device of the backend's buckets."""
    return BUCKET_BYTES[device_of(backend)]


def _pack_bucket(bucket: Bucket, tensors: Iterable[tuple[str, Tensor]], memory: BucketMemory) -> Tensor:
    flat = memory.take(bucket_num_bytes(bucket))
    number = row = 0
    for name, tensor in tensors:
        meta = bucket[number] if number < len(bucket) else None
        shape = tuple(tensor.shape)
        count = 1 if meta is None or shape == meta.shape else next(iter(shape), 1)
        if meta is None or meta.name != name or shape not in (meta.shape, (count, *meta.shape)):
            raise _mismatch(bucket[number:], [(name, shape)])
        stacked_view(flat, row, meta, count).copy_(tensor.detach())
        _clear_gaps(flat, row, meta, count)
        number, row = number + count, row + count * meta.num_rows
    if number != len(bucket):
        raise _mismatch(bucket[number:], [])
    return flat


def _clear_gaps(flat: Tensor, row: int, meta: TensorMeta, count: int) -> None:
    """Write zeros behind each tensor, so that no earlier content of the memory is sent."""
    size = ROW_BYTES * meta.num_rows
    if size > meta.num_bytes:
        flat[ROW_BYTES * row :][: count * size].view(count, size)[:, meta.num_bytes :] = 0


def _mismatch(left: Bucket, given: list[tuple[str, tuple[int, ...]]]) -> ValueError:
    planned = [(meta.name, meta.shape) for meta in left[:2]]
    return ValueError(f"weight push: the plan has {planned} where the bucket has {given}")


class Feed:
    """The queue of one link: buckets in order, then the digest as a string."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Tensor | str] = asyncio.Queue()
        self.is_wanted = asyncio.Event()  # set when the link has sent all its items
        self.is_wanted.set()

    def put(self, item: Tensor | str) -> None:
        self.is_wanted.clear()
        self.items.put_nowait(item)

    def has_sent_one(self) -> None:
        """Note that the link has sent its latest item."""
        if self.items.empty():
            self.is_wanted.set()


class Feeds:
    """The queues of a push. links: each link's task and its queue."""

    def __init__(self, links: Sequence[tuple[asyncio.Task[Any], Feed]]) -> None:
        self._links = links
        self._behind: set[Feed] = set()
        self._put_at = time.monotonic()

    async def put(self, item: Tensor | str) -> bool:
        """Put the item into every live link's queue, once all links that are not behind have sent the previous one.

        Returns whether all queues were empty: the memory of earlier buckets is free then.
        """
        await self._wait_for_pace()
        live = [feed for push, feed in self._links if not push.done()]
        is_free = all(feed.is_wanted.is_set() for feed in live)
        for feed in live:
            feed.put(item)
        self._put_at = time.monotonic()
        return is_free

    async def _wait_for_pace(self) -> None:
        live = [(push, feed) for push, feed in self._links if not push.done()]
        self._behind = {feed for _, feed in live if feed in self._behind and not feed.is_wanted.is_set()}
        awaited = [pair for pair in live if pair[1] not in self._behind] or live
        waiting: dict[asyncio.Future[None], Feed] = {
            asyncio.ensure_future(_ready(push, feed)): feed for push, feed in awaited
        }
        try:
            await self._wait_for_fastest(waiting)
            took_s = time.monotonic() - self._put_at
            if waiting:
                await asyncio.wait(waiting, timeout=max(_PATIENCE_S, _TIMES * took_s))
            self._behind |= {feed for wait, feed in waiting.items() if not wait.done()}
        finally:
            for wait in waiting:
                wait.cancel()

    async def _wait_for_fastest(self, waiting: dict[asyncio.Future[None], Feed]) -> None:
        """Return once a live link has sent its items, or all links have failed."""
        left: set[asyncio.Future[None]] = set(waiting)
        while left and not any(feed.is_wanted.is_set() for feed in waiting.values()):
            _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)


async def _ready(push: asyncio.Task[Any], feed: Feed) -> None:
    """Return once the link wants the next item, or its push has ended."""
    wanted = asyncio.ensure_future(feed.is_wanted.wait())
    try:
        await asyncio.wait({push, wanted}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        wanted.cancel()
