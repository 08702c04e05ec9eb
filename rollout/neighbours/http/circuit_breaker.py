"""Delays calls to a service that keeps failing; one breaker per URL.

closed: every attempt passes. At least `threshold` consecutive failures over at least `after_s` open it: attempts wait,
or raise BreakerOpen. After the cooldown one attempt passes as a trial. Its success closes the breaker. After a failure
the next trial comes after twice the cooldown, up to `max_cooldown_s`.
Attempts wait instead of failing, so that a finished trajectory survives an outage of its reward service.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from protocol.one_line import one_line

_log = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0


class BreakerOpen(Exception):
    """The breaker is open and the caller did not want to wait: no attempt was made."""


class CircuitBreaker:
    """A breaker of one event loop.

    Example: cooldown_s 1, max_cooldown_s 5: a service that refuses connections for a minute gets trials after 1, 3, 7,
    12, 17, .. s, so its return is noticed within 5 s.
    """

    def __init__(
        self,
        threshold: int = 3,
        cooldown_s: float = 1.0,
        max_cooldown_s: float = 5.0,
        after_s: float = 1.0,
        is_failure: Callable[[Exception], bool] = lambda error: True,
        name: str = "a service",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """after_s: a shorter series of failures is normal for a busy service."""
        self._threshold = threshold
        self._after_s = after_s
        self._is_failure = is_failure
        self._name = name
        self._clock = clock
        self._first_cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._cooldown_s = cooldown_s
        self._num_failures = 0  # consecutive failures
        self._first_failure_at = 0.0
        self._trial_at: float | None = None  # time of the next trial by `clock`; None: closed
        self._opened_at = 0.0
        self._logged_at = float("-inf")
        self._num_waiting = 0
        self._closed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True while attempts wait. False when a trial is due and no attempt waits to make it."""
        return not self.may_pass or (self._trial_at is not None and self._num_waiting > 0)

    @property
    def may_pass(self) -> bool:
        """True while the next attempt passes at once."""
        return self._trial_at is None or self._clock() >= self._trial_at

    @asynccontextmanager
    async def attempt(self, waits: bool = True) -> AsyncIterator[bool]:
        """Wait until an attempt may start; the block is the attempt. Yields whether it is a trial.

        An exception counts as a failure if `is_failure` accepts it, else as a success. Cancellation counts as neither.
        Raises: BreakerOpen at an open breaker, unless `waits`.
        """
        is_trial = await self._admit(waits)
        try:
            yield is_trial
        except Exception as error:
            if self._is_failure(error):
                self._record_failure(error)
            else:
                self._record_success()
            raise
        else:
            self._record_success()

    async def ready(self) -> None:
        """Return once an attempt may start: the breaker is closed, or a trial is due."""
        self._num_waiting += 1
        try:
            while self._trial_at is not None and (left_s := self._trial_at - self._clock()) > 0:
                try:
                    async with asyncio.timeout(left_s):
                        await self._closed.wait()
                except TimeoutError:
                    continue
        finally:
            self._num_waiting -= 1

    async def _admit(self, waits: bool) -> bool:
        """Return whether the attempt that may now start is a trial."""
        while not self.may_pass:
            if not waits:
                raise BreakerOpen(self._name)
            await self.ready()
        if self._trial_at is None:
            return False
        # A trial that hangs or is cancelled delays the next one by no more than the cooldown.
        self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
        self._trial_at = self._clock() + self._cooldown_s
        return True

    def _record_failure(self, error: Exception) -> None:
        now = self._clock()
        if self._num_failures == 0:
            self._first_failure_at = now
        self._num_failures += 1
        is_down = self._num_failures >= self._threshold and now - self._first_failure_at >= self._after_s
        if self._trial_at is None and is_down:
            self._trial_at, self._opened_at = now + self._cooldown_s, now
            if now - self._logged_at > _LOG_EVERY_S:
                self._logged_at = now
                _log.warning(
                    '%s is down  last="%s" consequence="samples that need it wait"', self._name, one_line(error)
                )

    def _record_success(self) -> None:
        self._num_failures = 0
        self._cooldown_s = self._first_cooldown_s
        if self._trial_at is not None:
            _log.info("%s is up again  down_s=%.1f", self._name, self._clock() - self._opened_at)
            self._trial_at = None
            self._closed.set()
            self._closed = asyncio.Event()


async def first_ready(breakers: Sequence[CircuitBreaker]) -> None:
    """Return once one of the breakers lets an attempt pass."""
    waiting = [asyncio.ensure_future(breaker.ready()) for breaker in breakers]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
