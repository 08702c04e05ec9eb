"""Refuses late calls of a weight push: only the newest attempt of the attached run's learner may act.

The learner stops waiting for a call after a deadline and starts the next attempt. The call is not cancelled: it may
still run here, or arrive later. Two attempts to join at once would leave the server in the wrong group.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from protocol.errors import NeighbourError
from protocol.weights.controls import Attempt

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class AttemptFence:
    """Lets the calls of one attempt pass. Lives in one event loop."""

    def __init__(self, server: str) -> None:
        """server: name in the errors."""
        self._server = server
        self._learner: str | None = None  # learner whose calls pass; None: any, because no run was attached yet
        self._number = 0  # number of the newest attempt
        self._running: set[asyncio.Task[Any]] = set()  # calls that have not ended

    async def expect(self, learner: str) -> None:
        """Let only this learner's calls pass, with attempts from 1. Running calls are cancelled first."""
        self._learner, self._number = learner, 0
        await self._end_running()

    async def begin(self, attempt: Attempt, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of an attempt's first call, after calls of earlier attempts were cancelled.

        Raises: NeighbourError when this or a newer attempt has begun, or a newer one begins during the call.
        """
        number = self._number_of(attempt)
        if number <= self._number:
            self._refuse(attempt)
        self._number = number
        await self._end_running()
        return await self.resume(attempt, call)

    async def resume(self, attempt: Attempt, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a later call of the newest attempt. Raises: NeighbourError for any other attempt."""
        if self._number_of(attempt) != self._number:
            self._refuse(attempt)
        task = asyncio.ensure_future(call())
        self._running.add(task)
        # A call whose caller was cancelled may take time to end, and the next attempt must wait for it.
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()  # in case the caller was cancelled
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


def fence_calls(
    fence: str, *, begins: bool = False
) -> Callable[
    [Callable[Concatenate[S, P], Coroutine[Any, Any, T]]],
    Callable[Concatenate[S, Attempt, P], Coroutine[Any, Any, T]],
]:
    """Return a decorator for a method that may only be called through a fence, with the attempt as first argument.

    fence: name of the attribute with the AttemptFence. begins: whether the method is the first call of an attempt.
    """

    def decorate(
        method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
    ) -> Callable[Concatenate[S, Attempt, P], Coroutine[Any, Any, T]]:
        async def call(self: S, attempt: Attempt, /, *args: P.args, **kwargs: P.kwargs) -> T:
            own: AttemptFence = getattr(self, fence)
            enter = own.begin if begins else own.resume
            return await enter(attempt, lambda: method(self, *args, **kwargs))

        # Not functools.wraps: Ray would take the signature of `method`, which lacks the attempt.
        call.__name__, call.__doc__ = getattr(method, "__name__", "call"), method.__doc__
        return call

    return decorate
