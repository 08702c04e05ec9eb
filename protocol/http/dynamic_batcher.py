"""Dynamic batching: the items of many requests that arrive while a batch runs form the next batch."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from protocol.waits import all_of

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_RESULTS_PER_TURN = 8  # results delivered in one turn of the event loop


@dataclass(frozen=True, eq=False)
class _QueuedItem(Generic[_Item, _Result]):
    """An item that waits for a batch."""

    item: _Item
    result: "asyncio.Future[_Result]"  # cancelled: its caller no longer waits


class DynamicBatcher(Generic[_Item, _Result]):
    """Calls `work` on its own threads with up to `size` items, oldest first. For one event loop.

    A batch starts as soon as a thread is free. Items whose caller was cancelled are dropped. When `work` raises for a
    batch it is called again for each item alone, so that a bad item does not affect the other items.
    """

    def __init__(
        self, work: Callable[[list[_Item]], Sequence[_Result]], size: int, name: str, num_threads: int = 1
    ) -> None:
        """work: returns one result per item, in order. name: name of the threads."""
        self._work = work
        self._size = size
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads
        self._waiting: deque[_QueuedItem[_Item, _Result]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, items: Sequence[_Item]) -> list[_Result]:
        """Return the items' results, in order. Raises: the error of `work` for the first failed item."""
        loop = asyncio.get_running_loop()
        mine: list[_QueuedItem[_Item, _Result]] = [_QueuedItem(item, loop.create_future()) for item in items]
        self._waiting.extend(mine)
        while self._waiting and len(self._running) < self._num_threads:
            self._running.add(loop.create_task(self._run_batches()))
        try:
            return await all_of(each.result for each in mine)
        finally:
            for each in mine:
                each.result.cancel()

    async def _run_batches(self) -> None:
        """Run batches until the queue is empty.

        The task leaves `_running` in the turn of the loop in which it found the queue empty: otherwise an item that
        arrives in between would stay in the queue.
        """
        task = asyncio.current_task()
        assert task is not None
        try:
            while batch := self._next_batch():
                await self._run_batch(batch)
        finally:
            self._running.discard(task)

    async def _run_batch(self, batch: Sequence[_QueuedItem[_Item, _Result]]) -> None:
        items = [each.item for each in batch]
        outcomes = await asyncio.get_running_loop().run_in_executor(self._threads, self._outcomes, items)
        for number, (each, (result, error)) in enumerate(zip(batch, outcomes, strict=True), start=1):
            if number % _RESULTS_PER_TURN == 0:
                await asyncio.sleep(0)  # callers get their turns between results
            if each.result.done():
                continue
            if error is not None:
                each.result.set_exception(error)
            else:
                each.result.set_result(result)  # type: ignore[arg-type]  # there is a result without an error

    def _next_batch(self) -> list[_QueuedItem[_Item, _Result]]:
        batch: list[_QueuedItem[_Item, _Result]] = []
        while self._waiting and len(batch) < self._size:
            each = self._waiting.popleft()
            if not each.result.done():
                batch.append(each)
        return batch

    def _outcomes(self, items: list[_Item]) -> list[tuple[_Result | None, Exception | None]]:
        try:
            return [(result, None) for result in self._work(items)]
        except Exception as error:
            if len(items) == 1:
                return [(None, error)]
        return [outcome for item in items for outcome in self._outcomes([item])]
