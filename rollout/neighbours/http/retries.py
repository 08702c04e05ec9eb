"""How requests to reward services and retrievers are retried; the numbers of the contract in one place.

`called` makes attempts until one succeeds or the deadline passes; what an attempt may raise is `AttemptFailed`, which
says how often it is worth trying.
"""

import asyncio
import email.utils
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from protocol.errors import NeighbourError

_T = TypeVar("_T")


@dataclass(frozen=True)
class HttpPolicy:
    """Time limits, attempts and caps of one call. The pause before a retry is drawn at random below a bound."""

    connect_timeout_s: float = 2.0  # longest wait for a connection
    attempt_timeout_s: float = 60.0  # longest attempt, from connecting to the whole reply
    # longest call, all attempts and pauses; waiting for a free slot or for a service that is down does not count
    overall_timeout_s: float = 180.0
    max_attempts: int = 4  # failed attempts after which a call is given up; those in an outage do not count
    min_backoff_s: float = 0.2  # shortest pause before an attempt; the first is drawn between it and five times it
    max_backoff_s: float = 10.0  # longest pause: its bound doubles up to here
    max_retry_after_s: float = 60.0  # longest pause that a service's Retry-After may ask for
    max_reply_bytes: int = 1 << 20  # a longer reply is an unusable one
    breaker_threshold: int = 3  # failures in a row that open the breaker
    breaker_after_s: float = 1.0  # shortest time from the first of them to the opening
    breaker_cooldown_s: float = 1.0  # from the breaker's opening to the first trial
    breaker_max_cooldown_s: float = 5.0  # longest time between two trials


class AttemptFailed(Exception):
    """One attempt failed."""

    def __init__(
        self, detail: str, max_attempts: int, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.max_attempts = max_attempts  # failures of this status that end the call; 1: trying again cannot help
        self.status = status  # HTTP status of the answer; None: there was none
        self.retry_after_s = retry_after_s  # pause that the service asked for, in seconds; None: it asked for none
        self.said = ""  # what the service said of it: the first 500 characters of its answer
        self.does_not_count = False  # True: the service fails other requests too, so this failure does not count
        self.waits_for_breaker = False  # True: the service's circuit breaker decides when to try again


def counts_against_service(error: Exception) -> bool:
    """Return whether a failed attempt is the service's fault, rather than of one request or of too many at once."""
    if not isinstance(error, AttemptFailed):
        return True
    return error.retry_after_s is None and error.status not in (400, 413, 422, 429)


def is_answer(error: Exception) -> bool:
    """Return whether a failed attempt found somebody there: an answer of any status."""
    return isinstance(error, AttemptFailed) and error.status is not None


def is_absence(failure: AttemptFailed) -> bool:
    """Return whether nobody answered who could have scored or searched: no request has a part in that."""
    return failure.status in (None, 408, 502, 503, 504)


async def called(
    boundary: str,
    policy: HttpPolicy,
    attempt: Callable[[asyncio.Timeout], Awaitable[_T]],
    on_retry: Callable[[], None],
    missing: str,
) -> _T:
    """Return what the first successful attempt of a call returns, within the policy's attempts and overall deadline.

    attempt: makes one; it is given the deadline, which it may stop while it only waits. on_retry: called before each
    further one. missing: what the error says did not come, such as `URL: no reward`.
    Raises: NeighbourError(boundary) with the last failure, the number of attempts and the time they took, or with
    `missing` when the deadline passed.
    """
    try:
        async with asyncio.timeout(policy.overall_timeout_s) as limit:
            return await _retried(boundary, policy, lambda: attempt(limit), on_retry)
    except TimeoutError:
        detail = f"{missing} within {policy.overall_timeout_s:g} s over all attempts"
        raise NeighbourError(boundary, detail) from None


async def _retried(
    boundary: str, policy: HttpPolicy, attempt: Callable[[], Awaitable[_T]], on_retry: Callable[[], None]
) -> _T:
    """Return what the first successful attempt returns. Failures that do not count are the deadline's alone."""
    started = time.monotonic()
    counted: Counter[int | None] = Counter()

    def has_failed(state: tenacity.RetryCallState) -> bool:
        failure = _failure_of(state)
        if failure.does_not_count:
            return False
        counted[failure.status] += 1
        return counted[failure.status] >= failure.max_attempts or counted.total() >= policy.max_attempts

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(AttemptFailed),
        stop=has_failed,
        wait=_Backoff(policy),
        before_sleep=lambda state: on_retry(),
        reraise=True,
    )

    async def attempt_once() -> _T:  # tenacity awaits what is declared async; a lambda's coroutine it would return
        return await attempt()

    try:
        return await retrying(attempt_once)
    except AttemptFailed as failure:
        attempts = retrying.statistics["attempt_number"]
        took_s = time.monotonic() - started
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        raise NeighbourError(boundary, f"{failure} ({times} in {took_s:.1f} s)") from failure


def failure_of_status(url: str, status: int, text: str, retry_after: str | None, policy: HttpPolicy) -> AttemptFailed:
    """Return the failure that an HTTP status other than 200 means, with the body's first 500 characters."""
    detail = f"{url} answered {status}: {text[:500]}"
    if status in (408, 429, 502, 503, 504):
        wait_s = min(_seconds_of(retry_after), policy.max_retry_after_s) if retry_after else None
        failure = AttemptFailed(detail, policy.max_attempts, status, wait_s)
    else:
        # A 500 is often one flaky call inside the user's function; a second one is a bug there. Others are final.
        # Both are answers: a function that always raises must show as a failure, not as an outage to be waited out.
        failure = AttemptFailed(detail, min(2, policy.max_attempts) if status == 500 else 1, status)
    failure.said = text[:500]
    return failure


class _Backoff:
    """Full jitter between the policy's bounds, after what the service asked for.

    It asks all whom it turns away for the same pause: without jitter they would come back together.
    """

    def __init__(self, policy: HttpPolicy) -> None:
        # The window starts at five times the minimum: 1, 2, 4 s by default.
        self._jitter = tenacity.wait_random_exponential(
            multiplier=5 * policy.min_backoff_s, min=policy.min_backoff_s, max=policy.max_backoff_s
        )

    def __call__(self, state: tenacity.RetryCallState) -> float:
        failure = _failure_of(state)
        return 0.0 if failure.waits_for_breaker else self._jitter(state) + (failure.retry_after_s or 0.0)


def _failure_of(state: tenacity.RetryCallState) -> AttemptFailed:
    failure = state.outcome.exception() if state.outcome else None
    assert isinstance(failure, AttemptFailed)  # the only type that `retry` lets through
    return failure


def _seconds_of(retry_after: str) -> float:
    """Return a Retry-After header as seconds from now: a number, or an HTTP date; 0 for anything else."""
    try:
        seconds = float(retry_after)
        return seconds if seconds > 0 else 0.0  # not so for "nan" either
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except Exception:  # the header is anyone's, and the parser raises OverflowError and others besides ValueError
        return 0.0
