"""The circuit breaker: when it holds attempts back, and how it lets them through again."""

import asyncio
import time

import pytest

from rollout.circuit_breaker import CircuitBreaker


async def fail(breaker: CircuitBreaker) -> None:
    with pytest.raises(RuntimeError):
        async with breaker.attempt():
            raise RuntimeError


async def succeed(breaker: CircuitBreaker) -> None:
    async with breaker.attempt():
        pass


async def test_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(threshold=3, cooldown_s=60)
    for _ in range(2):
        await fail(breaker)
        await fail(breaker)
        await succeed(breaker)
    assert not breaker.is_open
    for _ in range(3):
        await fail(breaker)
    assert breaker.is_open


async def test_breaker_lets_one_trial_through_and_all_after_its_success() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.05)
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
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.1)
    await fail(breaker)
    await fail(breaker)
    started = time.monotonic()
    await succeed(breaker)
    assert 0.15 < time.monotonic() - started < 10.0


async def test_breaker_gives_the_trial_to_another_when_it_is_cancelled() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_s=0.01)
    await fail(breaker)

    async def hang() -> None:
        async with breaker.attempt():
            await asyncio.sleep(60)

    trial = asyncio.create_task(hang())
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(succeed(breaker))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    trial.cancel()
    await asyncio.wait_for(waiting, 1)


async def test_breaker_does_not_count_what_is_no_failure_of_the_service() -> None:
    breaker = CircuitBreaker(threshold=1, is_failure=lambda error: not isinstance(error, RuntimeError))
    await fail(breaker)
    assert not breaker.is_open
