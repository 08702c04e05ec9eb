"""Work of many requests done together: what waits while one batch runs makes the next one."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_RESULTS_A_TURN = 8  # given out in one turn of the event loop


@dataclass(frozen=True, eq=False)
class _Waiting(Generic[_Item, _Result]):
    """An item that no batch has taken yet."""

    item: _Item
    result: "asyncio.Future[_Result]"  # cancelled: nobody waits for it any more


class MicroBatches(Generic[_Item, _Result]):
    """Calls `work` on threads of its own with up to `size` items, oldest first; of one event loop.

    No item waits for others to come: a batch begins as soon as a thread is free. Items whose caller has gone are left
    out. When `work` raises for a batch it is called again for each item alone, so that one bad item costs no other its
    result.
    Example: size 4, one thread: of 9 items at once, batches of 4, 4 and 1.
    """

    def __init__(
        self, work: Callable[[list[_Item]], Sequence[_Result]], size: int, name: str, num_threads: int = 1
    ) -> None:
        """work: returns one result per item, in order. name: of the threads."""
        self._work = work
        self._size = size
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads
        self._waiting: deque[_Waiting[_Item, _Result]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, items: Sequence[_Item]) -> list[_Result]:
        """Return the items' results, in order. Raises: what `work` raised for the first of them that it failed on."""
        loop = asyncio.get_running_loop()
        mine: list[_Waiting[_Item, _Result]] = [_Waiting(item, loop.create_future()) for item in items]
        self._waiting.extend(mine)
        while self._waiting and len(self._running) < self._num_threads:
            self._running.add(loop.create_task(self._run_batches()))
        try:
            outcomes = await asyncio.gather(*(each.result for each in mine), return_exceptions=True)
        finally:
            for each in mine:
                each.result.cancel()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def _run_batches(self) -> None:
        """Run batches until nothing waits.

        It leaves `_running` in the same turn of the loop in which it found nothing: an item that came between the two
        would wait for ever.
        """
        task = asyncio.current_task()
        assert task is not None
        try:
            while batch := self._next_batch():
                await self._run_batch(batch)
        finally:
            self._running.discard(task)

    async def _run_batch(self, batch: Sequence[_Waiting[_Item, _Result]]) -> None:
        items = [each.item for each in batch]
        outcomes = await asyncio.get_running_loop().run_in_executor(self._threads, self._outcomes, items)
        for number, (each, (result, error)) in enumerate(zip(batch, outcomes, strict=True), start=1):
            if number % _RESULTS_A_TURN == 0:
                await asyncio.sleep(0)  # what follows on a result costs more than it: a loop that does all is late
            if each.result.done():
                continue
            if error is not None:
                each.result.set_exception(error)
            else:
                each.result.set_result(result)  # type: ignore[arg-type]  # a result wherever there is no error

    def _next_batch(self) -> list[_Waiting[_Item, _Result]]:
        batch: list[_Waiting[_Item, _Result]] = []
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
