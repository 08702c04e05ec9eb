"""Holds calls back from a service that keeps failing; one per URL.

closed: every attempt passes. It opens when at least `threshold` attempts in a row failed, over at least `after_s`:
attempts wait, or raise BreakerOpen. When the cooldown is over one attempt passes as a trial. If it succeeds the breaker
closes; if not, the next trial comes after twice the cooldown, up to `max_cooldown_s`. A trial that gets an HTTP error
after a time with no reply at all means that the service is up but flaky: the cooldowns begin again at the first one.
Attempts wait rather than fail: a finished trajectory survives an outage of its reward service.
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
    """Lives in one event loop.

    Example: cooldown_s 1, max_cooldown_s 5: a service that refuses connections for a minute is tried after 1, 3, 7, 12,
    17, .. s, so it is found up again within 5 s. If it then answers 503, further trials follow 1, 3, 7 s later.
    """

    def __init__(
        self,
        threshold: int = 3,
        cooldown_s: float = 1.0,
        max_cooldown_s: float = 5.0,
        after_s: float = 1.0,
        is_failure: Callable[[Exception], bool] = lambda error: True,
        is_answer: Callable[[Exception], bool] = lambda error: False,
        name: str = "a service",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """after_s: shorter rows of failures are the bad luck of a busy service that fails now and then.

        is_answer: whether the service was there when an attempt failed.
        """
        self._threshold = threshold
        self._after_s = after_s
        self._is_failure = is_failure
        self._is_answer = is_answer
        self._has_answered = False
        self._name = name
        self._clock = clock
        self._first_cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._cooldown_s = cooldown_s
        self._failures_in_a_row = 0
        self._row_began_at = 0.0
        self._trial_at: float | None = None  # time of the next trial by `clock`; None: closed
        self._opened_at = 0.0
        self._logged_at = float("-inf")
        self._num_waiting = 0
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True while attempts wait. False once a trial is due and nobody is here to make it, so that somebody comes."""
        return not self.may_pass or (self._trial_at is not None and self._num_waiting > 0)

    @property
    def may_pass(self) -> bool:
        """True while an attempt would not have to wait; the next one may have to."""
        return self._trial_at is None or self._clock() >= self._trial_at

    @asynccontextmanager
    async def attempt(self, waits: bool = True) -> AsyncIterator[bool]:
        """Wait until an attempt may be made; the block is the attempt. Yields whether it is a trial.

        An exception from it is a failure where `is_failure` says so, else a success; cancelling it is neither.
        Raises: BreakerOpen instead of waiting, unless `waits`.
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
        """Return once an attempt may be made: the breaker is closed, or a trial is due."""
        self._num_waiting += 1
        try:
            while self._trial_at is not None and (left_s := self._trial_at - self._clock()) > 0:
                try:
                    async with asyncio.timeout(left_s):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._num_waiting -= 1

    async def _admit(self, waits: bool) -> bool:
        """Return whether the attempt that may now be made is a trial."""
        while not self.may_pass:
            if not waits:
                raise BreakerOpen(self._name)
            await self.ready()
        if self._trial_at is None:
            return False
        # A trial that hangs, or is cancelled, holds up no more than this: the next one comes after the cooldown.
        self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
        self._trial_at = self._clock() + self._cooldown_s
        return True

    def _record_failure(self, error: Exception) -> None:
        now = self._clock()
        if self._failures_in_a_row == 0:
            self._row_began_at = now
        self._failures_in_a_row += 1
        is_back = self._is_answer(error) and not self._has_answered
        self._has_answered = self._is_answer(error)
        if self._trial_at is not None and is_back:
            self._cooldown_s = self._first_cooldown_s
            self._trial_at = now + self._cooldown_s
            self._wake()
        is_row = self._failures_in_a_row >= self._threshold and now - self._row_began_at >= self._after_s
        if self._trial_at is None and is_row:
            self._trial_at, self._opened_at = now + self._cooldown_s, now
            if now - self._logged_at > _LOG_EVERY_S:
                self._logged_at = now
                _log.warning(
                    '%s is down  last="%s" consequence="samples that need it wait"', self._name, one_line(error)
                )

    def _record_success(self) -> None:
        self._failures_in_a_row = 0
        self._cooldown_s = self._first_cooldown_s
        if self._trial_at is not None:
            _log.info("%s is up again  down_s=%.1f", self._name, self._clock() - self._opened_at)
            self._trial_at = None
            self._wake()

    def _wake(self) -> None:
        """Have those who wait look at the time of the next trial again."""
        self._changed.set()
        self._changed = asyncio.Event()


async def first_ready(breakers: Sequence[CircuitBreaker]) -> None:
    """Return once one of the breakers would let an attempt pass."""
    waiting = [asyncio.ensure_future(breaker.ready()) for breaker in breakers]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
