"""Retries of a call within a number of attempts and a deadline."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from protocol.errors import NeighbourError
from rollout.neighbours.http.failures import AttemptFailed, FailureKind

_T = TypeVar("_T")


@dataclass(frozen=True)
class HttpPolicy:
    """Limits of one call. The pause before a retry is random below a growing bound."""

    connect_timeout_s: float = 2.0  # time limit of a connection
    attempt_timeout_s: float = 60.0  # time limit of an attempt, from connecting to the whole reply
    overall_timeout_s: float = 180.0  # time limit of a call, without waits for a slot or for a service that is down
    max_attempts: int = 4  # failed attempts that end a call, without those in an outage
    min_backoff_s: float = 0.2  # shortest pause before a retry; the first is between it and five times it
    max_backoff_s: float = 10.0  # longest pause
    max_retry_after_s: float = 60.0  # longest pause that a service's Retry-After can request
    max_reply_bytes: int = 1 << 20  # size limit of a reply
    breaker_threshold: int = 3  # consecutive failures that open the breaker
    breaker_after_s: float = 1.0  # shortest time from the first of these failures to the opening
    breaker_cooldown_s: float = 1.0  # time from the opening to the first trial
    breaker_max_cooldown_s: float = 5.0  # longest time between two trials


async def call_with_retries(
    boundary: str,
    policy: HttpPolicy,
    attempt: Callable[[asyncio.Timeout], Awaitable[_T]],
    on_retry: Callable[[], None],
    missing: str,
) -> _T:
    """Return the result of the first successful attempt.

    attempt: makes one attempt; it may pause the deadline that it receives. on_retry: called before each retry.
    missing: start of the error text when the deadline passes, such as `URL: no reward`.
    Raises: NeighbourError(boundary) with the last failure, the number of attempts and their duration.
    """
    try:
        async with asyncio.timeout(policy.overall_timeout_s) as limit:
            return await _retry(boundary, policy, lambda: attempt(limit), on_retry)
    except TimeoutError:
        detail = f"{missing} within {policy.overall_timeout_s:g} s over all attempts"
        raise NeighbourError(boundary, detail) from None


async def _retry(
    boundary: str, policy: HttpPolicy, attempt: Callable[[], Awaitable[_T]], on_retry: Callable[[], None]
) -> _T:
    started = time.monotonic()
    counts: Counter[FailureKind] = Counter()

    def is_last(state: tenacity.RetryCallState) -> bool:
        failure = _failure_of(state)
        if failure.is_free:
            return False
        counts[failure.kind] += 1
        most = failure.kind.value.max_attempts or policy.max_attempts
        return counts[failure.kind] >= most + failure.num_extra_attempts or counts.total() >= policy.max_attempts

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(AttemptFailed),
        stop=is_last,
        wait=_Backoff(policy),
        before_sleep=lambda state: on_retry(),
        reraise=True,
    )

    async def attempt_once() -> _T:  # tenacity does not await the coroutine of a lambda
        return await attempt()

    try:
        return await retrying(attempt_once)
    except AttemptFailed as failure:
        attempts = retrying.statistics["attempt_number"]
        took_s = time.monotonic() - started
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        raise NeighbourError(boundary, f"{failure} ({times} in {took_s:.1f} s)") from failure


class _Backoff:
    """A random pause within the policy's bounds, after the pause that the service requested.

    A busy service requests the same pause of all clients. Without the random part they would return together.
    """

    def __init__(self, policy: HttpPolicy) -> None:
        # The window starts at five times the minimum: 1, 2, 4 s by default.
        self._jitter = tenacity.wait_random_exponential(
            multiplier=5 * policy.min_backoff_s, min=policy.min_backoff_s, max=policy.max_backoff_s
        )

    def __call__(self, state: tenacity.RetryCallState) -> float:
        failure = _failure_of(state)
        return 0.0 if failure.waits_for_breaker else self._jitter(state) + failure.retry_after_s


def _failure_of(state: tenacity.RetryCallState) -> AttemptFailed:
    failure = state.outcome.exception() if state.outcome else None
    assert isinstance(failure, AttemptFailed)  # `retry` accepts no other type
    return failure
