"""The circuit breaker: when it holds attempts back, and how it lets them through again."""

import asyncio
import time

import pytest

from rollout.neighbours.http.circuit_breaker import BreakerOpen, CircuitBreaker, first_ready


class Clock:
    """A time that passes when the test says so, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def next_trial_after(breaker: CircuitBreaker, clock: Clock) -> int:
    """Let time pass until an attempt would be let through; returns the whole seconds until then."""
    for seconds in range(1000):
        if breaker.may_pass:
            return seconds
        clock.now += 1.0
    raise AssertionError("no trial within 1000 s")


def is_answer(error: Exception) -> bool:
    return isinstance(error, ConnectionAbortedError)


async def fail(breaker: CircuitBreaker, error: type[Exception] = RuntimeError) -> None:
    with pytest.raises(error):
        async with breaker.attempt():
            raise error


async def succeed(breaker: CircuitBreaker) -> None:
    async with breaker.attempt():
        pass


async def test_breaker_opens_after_failures_in_a_row_only() -> None:
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


async def test_breaker_waits_twice_as_long_after_a_failed_trial(clock: Clock) -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=2, after_s=0.0, clock=clock)
    await fail(breaker)
    assert next_trial_after(breaker, clock) == 2
    await fail(breaker)
    assert next_trial_after(breaker, clock) == 4


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


async def test_breaker_begins_its_cooldowns_anew_when_a_trial_is_answered_and_does_so_once(clock: Clock) -> None:
    breaker = CircuitBreaker(
        threshold=1, cooldown_s=1, max_cooldown_s=60, after_s=0.0, is_answer=is_answer, clock=clock
    )
    waited = []
    for error in [RuntimeError] * 4 + [ConnectionAbortedError] * 3:
        await fail(breaker, error)
        waited.append(next_trial_after(breaker, clock))
    assert waited == [1, 2, 4, 8, 1, 2, 4]


async def test_breaker_tries_at_least_every_max_cooldown(clock: Clock) -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=2, max_cooldown_s=5, after_s=0.0, clock=clock)
    waited = []
    for _ in range(5):
        await fail(breaker)
        waited.append(next_trial_after(breaker, clock))
    assert waited == [2, 4, 5, 5, 5]


async def test_breaker_stays_closed_while_the_row_of_failures_is_short(clock: Clock) -> None:
    breaker = CircuitBreaker(threshold=3, after_s=1.0, clock=clock)
    for _ in range(20):
        await fail(breaker)
    assert not breaker.is_open
    clock.now += 1.0
    await fail(breaker)
    assert breaker.is_open


async def test_breaker_holds_back_who_does_not_wait() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=60, after_s=0.0, name="http://a/")
    await fail(breaker)
    with pytest.raises(BreakerOpen, match="http://a/"):
        async with breaker.attempt(waits=False):
            pass


async def test_breaker_is_open_when_a_trial_is_due_only_while_somebody_is_there_to_make_it() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.05, after_s=0.0)
    await fail(breaker)
    waiting = asyncio.create_task(breaker.ready())
    await asyncio.sleep(0)
    assert breaker.is_open
    time.sleep(0.06)  # the trial comes due before the one who waits can run
    assert breaker.is_open
    await waiting
    assert not breaker.is_open
    assert breaker.may_pass


async def test_first_ready_returns_with_the_first_of_several() -> None:
    slow, quick = (CircuitBreaker(threshold=1, cooldown_s=s, after_s=0.0) for s in (60, 0.05))
    await fail(slow)
    await fail(quick)
    await asyncio.wait_for(first_ready([slow, quick]), 20)
    assert (slow.may_pass, quick.may_pass) == (False, True)


async def test_breaker_does_not_count_what_is_no_failure_of_the_service() -> None:
    breaker = CircuitBreaker(threshold=1, after_s=0.0, is_failure=lambda error: not isinstance(error, RuntimeError))
    await fail(breaker)
    assert not breaker.is_open
