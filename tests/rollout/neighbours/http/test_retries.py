"""Calls made of attempts: how many, for how long, and what the error says."""

import asyncio
import time
from dataclasses import replace

import pytest

from protocol.errors import NeighbourError
from rollout.neighbours.http.endpoint import paused_deadline
from rollout.neighbours.http.retries import AttemptFailed, HttpPolicy, called

POLICY = HttpPolicy(min_backoff_s=0.001, max_backoff_s=0.002, overall_timeout_s=60.0)


class Attempts:
    """Fails as its script says, then succeeds; counts attempts and retries."""

    def __init__(self, *failures: AttemptFailed) -> None:
        self._failures = list(failures)
        self.made = self.retries = 0

    async def __call__(self, limit: asyncio.Timeout) -> str:
        self.made += 1
        if self._failures:
            raise self._failures.pop(0)
        return "found"

    def count_retry(self) -> None:
        self.retries += 1


async def _called(attempts: Attempts, policy: HttpPolicy = POLICY) -> str:
    return await called("retriever", policy, attempts, attempts.count_retry, "http://r: no answer")


async def test_call_returns_what_the_first_successful_attempt_does() -> None:
    attempts = Attempts(AttemptFailed("down", 4), AttemptFailed("down", 4, 503))
    assert await _called(attempts) == "found"
    assert (attempts.made, attempts.retries) == (3, 2)


@pytest.mark.parametrize(
    ("max_attempts", "made", "told"), [(1, 1, "1 attempt"), (2, 2, "2 attempts"), (9, 4, "4 attempts")]
)
async def test_call_ends_at_the_failures_own_number_of_attempts_or_the_policys(
    max_attempts: int, made: int, told: str
) -> None:
    attempts = Attempts(*[AttemptFailed("http://r answered 500", max_attempts, 500) for _ in range(9)])
    with pytest.raises(NeighbourError, match=rf"retriever: http://r answered 500 \({told} in \d+\.\d s\)"):
        await _called(attempts)
    assert (attempts.made, attempts.retries) == (made, made - 1)


async def test_failures_that_do_not_count_are_bounded_by_the_deadline_alone() -> None:
    def uncounted() -> AttemptFailed:
        failure = AttemptFailed("down", 1)
        failure.does_not_count = True
        return failure

    assert await _called(Attempts(*[uncounted() for _ in range(20)])) == "found"
    endless = Attempts(*[uncounted() for _ in range(10_000)])
    with pytest.raises(NeighbourError, match=r"retriever: http://r: no answer within 1 s over all attempts"):
        await _called(endless, replace(POLICY, overall_timeout_s=1.0))
    assert endless.made > 4  # as many as count


async def test_attempt_may_stop_the_deadline_while_it_only_waits() -> None:
    async def waits(limit: asyncio.Timeout) -> str:
        with paused_deadline(limit):
            await asyncio.sleep(0.4)
        return "found"

    assert await called("retriever", replace(POLICY, overall_timeout_s=0.3), waits, lambda: None, "") == "found"


async def test_pause_is_never_shorter_than_the_service_asked_for() -> None:
    started = time.monotonic()
    await _called(Attempts(AttemptFailed("busy", 4, 503, retry_after_s=0.1)))
    assert time.monotonic() - started >= 0.1


async def test_clients_that_were_all_asked_to_wait_as_long_come_back_one_by_one() -> None:
    async def returned() -> float:
        failing = Attempts(AttemptFailed("busy", 4, 503, retry_after_s=0.1))
        started = time.monotonic()
        await _called(failing, replace(POLICY, min_backoff_s=0.05, max_backoff_s=0.5))
        return time.monotonic() - started

    waited = await asyncio.gather(*(returned() for _ in range(20)))
    assert min(waited) >= 0.1
    assert max(waited) - min(waited) > 0.02


async def test_other_exceptions_pass_as_they_are() -> None:
    async def broken(limit: asyncio.Timeout) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await called("retriever", replace(POLICY, max_attempts=9), broken, lambda: None, "")
