"""Retries of a call within a number of attempts and a deadline."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from protocol.errors import NeighbourError
from rollout.neighbours.http.failures import AttemptFailed, FailureKind

_T = TypeVar("_T")


@dataclass(frozen=True)
class HttpPolicy:
    """Limits of one call."""

    connect_timeout_s: float = 2.0
    attempt_timeout_s: float = 60.0  # time limit of an attempt, whole reply included
    overall_timeout_s: float = 180.0  # time limit of a call, without waits for a slot or an absent service
    max_attempts: int = 4  # failed attempts that end a call, without those in an outage
    min_backoff_s: float = 0.2
    max_backoff_s: float = 10.0
    max_retry_after_s: float = 60.0
    max_reply_bytes: int = 1 << 20
    breaker_threshold: int = 3  # consecutive failures that open the breaker
    breaker_after_s: float = 1.0  # shortest time from the first of these to the opening
    breaker_cooldown_s: float = 1.0  # time from the opening to the first trial
    breaker_max_cooldown_s: float = 5.0  # longest time between two trials


async def call_with_retries(
    boundary: str,
    policy: HttpPolicy,
    attempt: Callable[[asyncio.Timeout], Awaitable[_T]],
    timeout_text: str,
) -> _T:
    """Return the result of the first successful attempt.

    attempt: makes one attempt; it may pause the deadline that it receives.
    timeout_text: start of the error text of a timeout, such as `URL: no reward`.
    Raises: NeighbourError(boundary) with the last failure, the number of attempts and their duration.
    """
    started = time.monotonic()
    counts: Counter[FailureKind] = Counter()
    try:
        async with asyncio.timeout(policy.overall_timeout_s) as limit:
            for number in itertools.count(1):
                try:
                    return await attempt(limit)
                except AttemptFailed as failure:
                    if _is_last(failure, counts, policy):
                        times = "1 attempt" if number == 1 else f"{number} attempts"
                        detail = f"{failure} ({times} in {time.monotonic() - started:.1f} s)"
                        raise NeighbourError(boundary, detail, failure.place) from failure
                    await asyncio.sleep(_pause_s(failure, number, policy))
    except TimeoutError:
        detail = f"{timeout_text} within {policy.overall_timeout_s:g} s over all attempts"
        raise NeighbourError(boundary, detail) from None
    raise AssertionError("unreachable")


def _is_last(failure: AttemptFailed, counts: Counter[FailureKind], policy: HttpPolicy) -> bool:
    """Count a failure, unless it is free; return whether the call ends with it."""
    if failure.is_free:
        return False
    counts[failure.kind] += 1
    most = failure.kind.value.max_attempts or policy.max_attempts
    return counts[failure.kind] >= most or counts.total() >= policy.max_attempts


def _pause_s(failure: AttemptFailed, number: int, policy: HttpPolicy) -> float:
    """Return the pause after attempt `number`: the service's Retry-After plus a random part.

    Without it, clients with the same Retry-After would return together.
    """
    if failure.waits_for_breaker:
        return 0.0
    # The bound starts at five times the minimum: 1, 2, 4 s by default. 2**30 avoids an overflow.
    bound_s = min(policy.max_backoff_s, 5 * policy.min_backoff_s * 2 ** min(number - 1, 30))
    pause_s = random.uniform(policy.min_backoff_s, max(policy.min_backoff_s, bound_s))  # noqa: S311
    return failure.retry_after_s + pause_s
