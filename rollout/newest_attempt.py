"""Which calls of weight pushes still count: those of the attached run's learner, of its newest attempt.

The learner gives a call up after a deadline and makes the next attempt. The call is not taken back: it may go on here,
or arrive after calls of the next one. Two attempts to join that ran at once would leave either's group behind, and the
next push would wait for a server that is in another one.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from protocol.errors import NeighbourError
from protocol.weights.controls import Attempt

T = TypeVar("T")


class NewestAttempt:
    """Admits calls of one attempt at a time. Lives in one event loop."""

    def __init__(self, server: str) -> None:
        """server: named in refusals."""
        self._server = server
        self._learner: str | None = None  # whose calls count; None: anyone's, since no run was attached yet
        self._number = 0  # of the newest attempt
        self._running: set[asyncio.Task[Any]] = set()  # its calls

    async def expect(self, learner: str) -> None:
        """Let this learner's calls count alone; its attempts begin anew. What runs for the one before ends first."""
        self._learner, self._number = learner, 0
        await self._end_running()

    async def begin(self, attempt: Attempt, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what the first call of an attempt comes to; calls of earlier ones end before it begins.

        Raises: NeighbourError when as new an attempt has begun already, or begins while this one goes on.
        """
        number = self._number_of(attempt)
        if number <= self._number:
            self._refuse(attempt)
        self._number = number
        await self._end_running()
        return await self.go_on(attempt, call)

    async def go_on(self, attempt: Attempt, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what a later call of the newest attempt comes to. Raises: NeighbourError for one of any other."""
        if self._number_of(attempt) != self._number:
            self._refuse(attempt)
        task = asyncio.ensure_future(call())
        self._running.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._running.discard(task)
            task.cancel()  # where who asked has gone
        if task.cancelled():
            self._refuse(attempt)
        return task.result()

    async def _end_running(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _number_of(self, attempt: Attempt) -> int:
        learner, number = attempt
        if self._learner not in (None, learner):
            raise NeighbourError(self._server, f"serves learner {self._learner}, not {learner}")
        return number

    def _refuse(self, attempt: Attempt) -> NoReturn:
        if (number := self._number_of(attempt)) > self._number:
            raise NeighbourError(self._server, f"attempt {number} of the learner has not begun")
        raise NeighbourError(self._server, f"attempt {number} of the learner is over: attempt {self._number} has begun")
