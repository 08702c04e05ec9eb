"""Records when a sample's tools and services were called, and how often each was requested.

A call that nobody records costs two reads of a clock.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from protocol.wire.trajectory import MAX_NAME, CallKind, TimedCall

# A task inherits both from its parent task: the same objects.
_calls: ContextVar[list[TimedCall] | None] = ContextVar("calls", default=None)
_attempts: ContextVar["Attempts | None"] = ContextVar("attempts", default=None)


@dataclass
class Attempts:
    """Number of requests so far of one call, or of a batch of calls."""

    num: int = 0


@contextmanager
def record_calls() -> Iterator[list[TimedCall]]:
    """Yield the list of all calls within the block, in the order of their ends; child tasks add to it too."""
    calls: list[TimedCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


@contextmanager
def timed_call(kind: CallKind, name: str) -> Iterator[None]:
    """Record the block as a call, also if it fails."""
    started_at = time.time()
    with count_attempts() as attempts:
        try:
            yield
        finally:
            if (calls := _calls.get()) is not None:
                calls.append(TimedCall(kind, name[:MAX_NAME] or "?", started_at, time.time(), attempts.num))


@contextmanager
def count_attempts() -> Iterator[Attempts]:
    """Yield the number of requests that are sent within the block."""
    attempts = Attempts()
    token = _attempts.set(attempts)
    try:
        yield attempts
    finally:
        _attempts.reset(token)


def add_attempts(num: int) -> None:
    """Add requests to the call that is under way."""
    if (attempts := _attempts.get()) is not None:
        attempts.num += num
