"""Runs sync functions on threads, outside the event loop. Queued calls of disconnected clients are skipped."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class _Call:
    """A call that runs on a thread."""

    abandoned_at: float | None = None  # monotonic seconds; None: a client waits for the result


class Workers:
    """Threads for a user's function. The default is one: users' functions are seldom thread-safe."""

    def __init__(self, number: int = 1) -> None:
        self._number = number
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="reward-function")
        self._running: set[_Call] = set()

    @property
    def stuck_s(self) -> float:
        """Seconds since all threads run abandoned calls; 0 while a thread is free or useful.

        A running call cannot be cancelled. A call that never returns keeps its thread.
        """
        calls = tuple(self._running)
        times = [call.abandoned_at for call in calls if call.abandoned_at is not None]
        return time.monotonic() - max(times) if len(times) == self._number else 0.0

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function, or raise its error. Waits for a free thread.

        Cancelled while it waits, the function is not called.
        """
        call = _Call()

        def work() -> tuple[Any, BaseException | None]:
            self._running.add(call)
            try:
                return function(), None
            except BaseException as error:  # a future cannot carry StopIteration: the caller would wait forever
                return None, error
            finally:
                self._running.discard(call)

        try:
            returned, error = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except asyncio.CancelledError:
            call.abandoned_at = time.monotonic()
            raise
        if error is not None:
            raise error
        return returned
