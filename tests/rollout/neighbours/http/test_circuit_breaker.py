"""The circuit breaker: when it holds attempts back, and how it lets them through again."""

import asyncio
import time

import pytest

from rollout.neighbours.http.circuit_breaker import BreakerOpen, CircuitBreaker, first_ready


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


async def test_breaker_lets_one_trial_through_and_all_after_its_success() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.05, after_s=0.0)
    await fail(breaker)
    running = 0
    most_before_success = 0

    async def attempt() -> None:
        nonlocal running, most_before_success
        async with breaker.attempt():
            running += 1
            if most_before_success == 0:
                await asyncio.sleep(0.05)
                most_before_success = running

    await asyncio.wait_for(asyncio.gather(*(attempt() for _ in range(5))), 2)
    assert (most_before_success, running) == (1, 5)
    assert not breaker.is_open


async def test_breaker_waits_twice_as_long_after_a_failed_trial() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.1, after_s=0.0)
    await fail(breaker)
    await fail(breaker)
    started = time.monotonic()
    await succeed(breaker)
    assert 0.15 < time.monotonic() - started < 10.0


async def test_breaker_lets_another_trial_through_when_the_first_one_hangs() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.05, after_s=0.0)
    await fail(breaker)

    async def hang() -> None:
        async with breaker.attempt():
            await asyncio.sleep(60)

    trial = asyncio.create_task(hang())
    await asyncio.sleep(0.07)
    waiting = asyncio.create_task(succeed(breaker))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
    assert not breaker.is_open
    trial.cancel()


async def test_breaker_begins_its_cooldowns_anew_when_a_trial_is_answered_and_does_so_once() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.05, max_cooldown_s=60, after_s=0.0, is_answer=is_answer)
    for _ in range(5):  # the next trials are 50, 100, 200, 400 and 800 ms later
        await fail(breaker)
    await fail(breaker, ConnectionAbortedError)
    started = time.monotonic()
    await fail(breaker, ConnectionAbortedError)  # 50 ms later, and the next one 100 ms after that
    await succeed(breaker)
    assert 0.14 < time.monotonic() - started < 0.7


async def test_breaker_tries_at_least_every_max_cooldown() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.02, max_cooldown_s=0.04, after_s=0.0)
    started = time.monotonic()
    for _ in range(9):  # opened, then after 20 and seven times 40 ms; without a longest time the last waits 2.56 s
        await fail(breaker)
    assert 0.3 <= time.monotonic() - started < 2.5


async def test_breaker_stays_closed_while_the_row_of_failures_is_short() -> None:
    breaker = CircuitBreaker(threshold=3, after_s=0.1)
    for _ in range(20):
        await fail(breaker)
    assert not breaker.is_open
    await asyncio.sleep(0.1)
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
    await asyncio.wait_for(first_ready([slow, quick]), 5)
    assert (slow.may_pass, quick.may_pass) == (False, True)


async def test_breaker_does_not_count_what_is_no_failure_of_the_service() -> None:
    breaker = CircuitBreaker(threshold=1, after_s=0.0, is_failure=lambda error: not isinstance(error, RuntimeError))
    await fail(breaker)
    assert not breaker.is_open
