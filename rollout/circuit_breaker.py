"""Holds calls back from a service that keeps failing; one per URL, used by `rollout.http_endpoint`.

closed: every attempt passes. After `threshold` failures in a row it opens: attempts wait. When the cooldown is over
one attempt passes as a trial; its success closes the breaker, its failure opens it again for twice as long.
Attempts wait rather than fail: a finished trajectory survives the restart of a reward service within its deadline.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class CircuitBreaker:
    """Lives in one event loop.

    Example: threshold 5, cooldown_s 5: five refused connections open it for 5 s, a failed trial for 10 s, then 20 s.
    """

    def __init__(
        self,
        threshold: int = 5,
        cooldown_s: float = 5.0,
        max_cooldown_s: float = 60.0,
        is_failure: Callable[[Exception], bool] = lambda error: True,
    ) -> None:
        self._threshold = threshold
        self._is_failure = is_failure
        self._first_cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._cooldown_s = cooldown_s
        self._failures_in_a_row = 0
        self._opens_again_at: float | None = None  # monotonic time of the next trial; None: closed
        self._is_trial_running = False
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True while attempts wait. False once a trial is due, so that somebody comes and makes it."""
        return self._opens_again_at is not None and time.monotonic() < self._opens_again_at

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """Wait until an attempt may be made; the block is the attempt.

        An exception from it is a failure where `is_failure` says so, else a success; cancelling it is neither.
        """
        is_trial = await self._admit()
        try:
            yield
        except Exception as error:
            if self._is_failure(error):
                self._record_failure(is_trial)
            else:
                self._record_success()
            raise
        else:
            self._record_success()
        finally:
            if is_trial:
                self._is_trial_running = False
                self._wake()

    async def _admit(self) -> bool:
        """Return whether the attempt that may now be made is a trial."""
        while self._opens_again_at is not None:
            left_s = self._opens_again_at - time.monotonic()
            if left_s <= 0 and not self._is_trial_running:
                self._is_trial_running = True
                return True
            try:
                async with asyncio.timeout(left_s if left_s > 0 else None):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return False

    def _record_failure(self, is_trial: bool) -> None:
        self._failures_in_a_row += 1
        if is_trial:
            self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
            self._opens_again_at = time.monotonic() + self._cooldown_s
        elif self._opens_again_at is None and self._failures_in_a_row >= self._threshold:
            self._opens_again_at = time.monotonic() + self._cooldown_s

    def _record_success(self) -> None:
        self._failures_in_a_row = 0
        self._cooldown_s = self._first_cooldown_s
        if self._opens_again_at is not None:
            self._opens_again_at = None
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
