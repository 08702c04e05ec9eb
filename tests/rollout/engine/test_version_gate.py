"""The gate that turns wait at while weights change."""

import asyncio

import pytest

from rollout.engine.version_gate import VersionGate


async def _turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_gate_starts_closed_and_lets_pass_once_it_is_open() -> None:
    gate = VersionGate()
    passing = asyncio.create_task(gate.wait_open())
    await _turn()
    assert not passing.done()

    gate.open()
    await _turn()
    assert passing.done()


async def test_gate_that_closes_before_a_waiter_wakes_holds_it_back() -> None:
    gate = VersionGate()
    passing = asyncio.create_task(gate.wait_open())
    await _turn()
    gate.open()
    gate.close()
    await _turn()
    assert not passing.done()

    gate.open()
    await passing


async def test_tokens_of_the_verified_version_are_used_while_another_is_loaded() -> None:
    gate = VersionGate()
    gate.open(3)
    gate.close()
    await gate.wait_verified(3)
    waiting = asyncio.create_task(gate.wait_verified(4))
    await _turn()
    assert not waiting.done()

    gate.open(4)
    await waiting


async def test_tokens_of_a_version_that_is_pushed_once_more_wait() -> None:
    gate = VersionGate()
    gate.open(3)
    gate.close(3)
    waiting = asyncio.create_task(gate.wait_verified(3))
    await _turn()
    assert not waiting.done()

    gate.open(3)
    await waiting


async def test_what_is_written_by_disowned_weights_is_given_up_at_once_and_what_waits_to_begin_is_not() -> None:
    gate = VersionGate()
    beginning = asyncio.create_task(gate.wait_open())

    async def write() -> None:
        async with asyncio.timeout(60.0) as deadline:
            with gate.writing(deadline):
                await gate.wait_verified(4)

    writing = asyncio.create_task(write())
    await _turn()
    gate.invalidate_unverified()
    with pytest.raises(TimeoutError):
        await writing
    assert gate.num_invalidated == 1
    assert not beginning.done()
    gate.invalidate_unverified()  # nothing is written any more
    gate.open(5)
    await beginning


async def test_time_stands_still_for_turns_that_are_being_written_while_the_engine_sleeps() -> None:
    gate, clock = VersionGate(), asyncio.get_running_loop()
    gate.open(1)
    async with asyncio.timeout(1000.0) as early:
        with gate.writing(early):
            gate.stop_time()
            gate.stop_time()  # a second call changes nothing
            async with asyncio.timeout(500.0) as late:
                with gate.writing(late):
                    assert (early.when(), late.when(), gate.is_open) == (None, None, False)
                    gate.start_time()
                    left = [(deadline.when() or 0.0) - clock.time() for deadline in (early, late)]
    assert left == pytest.approx([1000.0, 500.0], abs=60.0)
    assert not gate.is_open  # until its weights may be used


async def test_a_turn_that_is_given_up_in_its_sleep_stays_given_up() -> None:
    gate = VersionGate()

    async def write() -> None:
        async with asyncio.timeout(1000.0) as deadline:
            with gate.writing(deadline):
                gate.stop_time()
                gate.invalidate_unverified()
                gate.start_time()
                await asyncio.sleep(1000.0)

    with pytest.raises(TimeoutError):
        await write()
