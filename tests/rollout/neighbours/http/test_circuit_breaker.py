"""When the circuit breaker delays attempts, and when it lets them pass again."""

import asyncio
import time

import pytest

from rollout.neighbours.http.circuit_breaker import BreakerOpen, CircuitBreaker
from tests.fakes.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def next_trial_after(breaker: CircuitBreaker, clock: Clock) -> int:
    """Let time pass until an attempt may pass; return the whole seconds until then."""
    for seconds in range(1000):
        if breaker.may_pass:
            return seconds
        clock.now += 1.0
    raise AssertionError("no trial within 1000 s")


async def fail(breaker: CircuitBreaker) -> None:
    with pytest.raises(RuntimeError):
        async with breaker.attempt():
            raise RuntimeError


async def succeed(breaker: CircuitBreaker) -> None:
    async with breaker.attempt():
        pass


async def test_breaker_opens_after_consecutive_failures_only() -> None:
    breaker = CircuitBreaker(threshold=3, cooldown_s=60, after_s=0.0)
    for _ in range(2):
        await fail(breaker)
        await fail(breaker)
        await succeed(breaker)
    assert not breaker.is_open
    for _ in range(3):
        await fail(breaker)
    assert breaker.is_open


async def test_breaker_lets_one_trial_through_and_all_after_its_success(clock: Clock) -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.05, after_s=0.0, clock=clock)
    await fail(breaker)
    clock.now += 0.05
    running = 0
    most_before_success = 0

    async def attempt() -> None:
        nonlocal running, most_before_success
        async with breaker.attempt():
            running += 1
            if most_before_success == 0:
                for _ in range(10):
                    await asyncio.sleep(0)  # the others may run
                most_before_success = running

    await asyncio.wait_for(asyncio.gather(*(attempt() for _ in range(5))), 20)
    assert (most_before_success, running) == (1, 5)
    assert not breaker.is_open


async def test_breaker_lets_another_trial_through_when_the_first_one_hangs() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.05, after_s=0.0)
    began = time.monotonic()
    await fail(breaker)

    async def hang() -> None:
        async with breaker.attempt():
            is_hanging.set()
            await asyncio.sleep(600)

    is_hanging = asyncio.Event()
    trial = asyncio.create_task(hang())
    await asyncio.wait_for(is_hanging.wait(), 20)
    await asyncio.wait_for(succeed(breaker), 20)
    assert time.monotonic() - began >= 0.05 + 0.1  # the trial, and the next one twice as long after it
    assert not breaker.is_open
    trial.cancel()


async def test_cooldown_doubles_up_to_its_maximum(clock: Clock) -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=2, max_cooldown_s=5, after_s=0.0, clock=clock)
    waited = []
    for _ in range(5):
        await fail(breaker)
        waited.append(next_trial_after(breaker, clock))
    assert waited == [2, 4, 5, 5, 5]


async def test_breaker_stays_closed_during_a_short_series_of_failures(clock: Clock) -> None:
    breaker = CircuitBreaker(threshold=3, after_s=1.0, clock=clock)
    for _ in range(20):
        await fail(breaker)
    assert not breaker.is_open
    clock.now += 1.0
    await fail(breaker)
    assert breaker.is_open


async def test_open_breaker_raises_for_a_caller_that_does_not_wait() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=60, after_s=0.0, name="http://a/")
    await fail(breaker)
    with pytest.raises(BreakerOpen, match="http://a/"):
        async with breaker.attempt(waits=False):
            pass


async def test_breaker_with_a_due_trial_is_open_only_while_an_attempt_waits() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.05, after_s=0.0)
    await fail(breaker)
    waiting = asyncio.create_task(breaker.ready())
    await asyncio.sleep(0)
    assert breaker.is_open
    time.sleep(0.06)  # the trial is due before the waiting task can run
    assert breaker.is_open
    await waiting
    assert not breaker.is_open
    assert breaker.may_pass


async def test_breaker_ignores_errors_that_are_not_failures_of_the_service() -> None:
    breaker = CircuitBreaker(threshold=1, after_s=0.0, is_failure=lambda error: not isinstance(error, RuntimeError))
    await fail(breaker)
    assert not breaker.is_open
