"""Number, duration and error of a call's attempts."""

import asyncio
from dataclasses import replace

import pytest

from protocol.errors import NeighbourError
from rollout.neighbours.http.endpoint import HttpPolicy, call_with_retries, paused_deadline
from rollout.neighbours.http.failures import AttemptFailed, FailureKind

POLICY = HttpPolicy(min_backoff_s=0.001, max_backoff_s=0.002, overall_timeout_s=60.0)


class Attempts:
    """Fails by script, then succeeds; counts attempts."""

    def __init__(self, *failures: AttemptFailed) -> None:
        self._failures = list(failures)
        self.made = 0

    async def __call__(self, limit: asyncio.Timeout) -> str:
        self.made += 1
        if self._failures:
            raise self._failures.pop(0)
        return "found"


async def _call(attempts: Attempts, policy: HttpPolicy = POLICY) -> str:
    return await call_with_retries("retriever", policy, attempts, "http://r: no answer")


@pytest.mark.parametrize(
    ("kinds", "made", "times"),
    [
        ([FailureKind.REFUSED], 1, "1 attempt"),
        ([FailureKind.WRONG], 1, "1 attempt"),
        ([FailureKind.FAILED], 2, "2 attempts"),
        ([FailureKind.BUSY], 4, "4 attempts"),
        ([FailureKind.ABSENT], 4, "4 attempts"),
        ([FailureKind.FAILED, FailureKind.ABSENT, FailureKind.BUSY], 4, "4 attempts"),
        ([FailureKind.ABSENT, FailureKind.REFUSED], 2, "2 attempts"),
    ],
)
async def test_call_ends_at_the_limit_of_a_failures_kind_or_at_the_policys(
    kinds: list[FailureKind], made: int, times: str
) -> None:
    attempts = Attempts(*[AttemptFailed("http://r failed", kind) for kind in kinds * 9])
    with pytest.raises(NeighbourError, match=rf"retriever: http://r failed \({times} in \d+\.\d s\)"):
        await _call(attempts)
    assert attempts.made == made


async def test_free_failures_are_limited_by_the_deadline_only() -> None:
    def free() -> AttemptFailed:
        failure = AttemptFailed("down")
        failure.is_free = True
        return failure

    assert await _call(Attempts(*[free() for _ in range(20)])) == "found"
    endless = Attempts(*[free() for _ in range(10_000)])
    with pytest.raises(NeighbourError, match=r"retriever: http://r: no answer within 1 s over all attempts"):
        await _call(endless, replace(POLICY, overall_timeout_s=1.0))
    assert endless.made > 4


async def test_attempt_may_pause_the_deadline() -> None:
    async def waits(limit: asyncio.Timeout) -> str:
        with paused_deadline(limit):
            await asyncio.sleep(0.4)
        return "found"

    assert await call_with_retries("retriever", replace(POLICY, overall_timeout_s=0.3), waits, "") == "found"


async def test_other_exceptions_are_not_retried() -> None:
    async def broken(limit: asyncio.Timeout) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await call_with_retries("retriever", replace(POLICY, max_attempts=9), broken, "")
