"""Runs plain functions beside the event loop: so many at a time, none for a client that has left."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class _Call:
    """A call on one of the threads."""

    left_at: float | None = None  # monotonic seconds; None: somebody waits for what it returns


class Workers:
    """Threads for a user's function. One is the default: users' functions are seldom safe to run in several at once."""

    def __init__(self, number: int = 1) -> None:
        self._number = number
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="reward-function")
        self._running: set[_Call] = set()

    @property
    def stuck_s(self) -> float:
        """Seconds since every thread is taken by a call that nobody waits for; 0 while one is free or of use.

        A call cannot be broken off. One that never returns keeps its thread for good.
        """
        calls = tuple(self._running)
        left = [call.left_at for call in calls if call.left_at is not None]
        return time.monotonic() - max(left) if len(left) == self._number else 0.0

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return what function returns, or raise what it raises, once a thread has been free for it.

        Cancelled while it waits for a thread, it is never called.
        """
        call = _Call()

        def work() -> tuple[Any, BaseException | None]:
            self._running.add(call)
            try:
                return function(), None
            except BaseException as error:  # no future passes on a StopIteration: who awaits it would wait for ever
                return None, error
            finally:
                self._running.discard(call)

        try:
            returned, error = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except asyncio.CancelledError:
            call.left_at = time.monotonic()
            raise
        if error is not None:
            raise error
        return returned
