"""Polling with a deadline, and waiting for several calls. docs/look_up/waits.md lists the waits of the system."""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


def until(timeout_s: float, poll_s: float = 0.0) -> Iterator[float]:
    """Yield the seconds left until `timeout_s` have passed: at once, then after each pause of `poll_s`.

    Yields at least once, and a last time at the deadline (0.0), so that a condition is tested after the whole wait.

    Example:
        for _ in until(60.0, poll_s=0.5):
            if is_ready():
                return
        raise NeighbourError("retriever", "was not ready within 60 s")
    """
    deadline = time.monotonic() + timeout_s
    left_s = timeout_s
    while left_s > 0:
        yield left_s
        time.sleep(max(0.0, min(poll_s, deadline - time.monotonic())))
        left_s = deadline - time.monotonic()
    yield 0.0


async def all_of(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    """Return the results of calls, in order. All calls end before the first error is raised."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
