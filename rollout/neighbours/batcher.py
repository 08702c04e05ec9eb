"""Combines simultaneous requests of several samples into one."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from protocol.errors import NeighbourError
from rollout.environments.timed_calls import add_attempts, count_attempts
from rollout.neighbours.http.failures import AttemptFailed, FailureKind

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

MAX_WAIT_S = 0.005
# Failures that a single item may cause.
_CAUSED_BY_AN_ITEM = (FailureKind.REFUSED, FailureKind.FAILED, FailureKind.RAISED)


class Batcher(Generic[_Item, _Result]):
    """Calls `send` with up to `size` items, when the batch is full or the first item has waited MAX_WAIT_S.

    `send` returns one result per item, in order; an exception among them is raised for its own item.
    Example: size 4 and 6 items at once: one call with 4 immediately, one with 2 after 5 ms.
    """

    def __init__(self, size: int, send: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result | Exception]]]) -> None:
        self._size = size
        self._send = send
        self._waiting: list[tuple[_Item, asyncio.Future[tuple[_Result, int]]]] = []  # result, requests that it took
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def add(self, item: _Item) -> _Result:
        """Return the item's result. Raises: the exception of the item or of its batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[_Result, int]] = loop.create_future()
        self._waiting.append((item, future))
        if len(self._waiting) >= self._size:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(MAX_WAIT_S, self._flush)
        result, num_attempts = await future
        add_attempts(num_attempts)
        return result

    async def close(self) -> None:
        """Cancel all batches and their waiting callers."""
        if self._timer is not None:
            self._timer.cancel()
        for _, future in self._waiting:
            future.cancel()
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Items of cancelled callers are dropped: their leases were cancelled.
        batch = [(item, future) for item, future in self._waiting if not future.done()]
        self._waiting = []
        if batch:
            task = asyncio.get_running_loop().create_task(self._deliver(batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            # A task that is cancelled before its first step does not run at all.
            task.add_done_callback(lambda _: [future.cancel() for _, future in batch])

    async def _deliver(self, batch: Sequence[tuple[_Item, "asyncio.Future[tuple[_Result, int]]"]]) -> None:
        try:
            with count_attempts() as attempts:
                results = await self._send([item for item, _ in batch])
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result((result, attempts.num))


async def split_if_refused(
    items: Sequence[_Item], send: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result]]]
) -> Sequence[_Result | Exception]:
    """Return the results of one request with all items; if the service refuses it, of one request per item.

    So an item that crashes the service does not affect the other items. An absent or busy service causes no split.
    Raises: NeighbourError for a single item, or if the request was not refused.
    """
    try:
        return await send(items)
    except NeighbourError as error:
        cause = error.__cause__
        if len(items) == 1 or not isinstance(cause, AttemptFailed) or cause.kind not in _CAUSED_BY_AN_ITEM:
            raise

    async def send_alone(item: _Item) -> _Result | Exception:
        try:
            return (await send([item]))[0]
        except NeighbourError as error:
            return error

    return await asyncio.gather(*map(send_alone, items))
