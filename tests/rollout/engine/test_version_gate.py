"""The gate that turns wait at while weights change."""

import asyncio

from rollout.engine.version_gate import VersionGate


async def _turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_gate_starts_closed_and_lets_pass_once_it_is_open() -> None:
    gate = VersionGate()
    passing = asyncio.create_task(gate.passed())
    await _turn()
    assert not passing.done()

    gate.open()
    await _turn()
    assert passing.done()


async def test_gate_that_closes_before_a_waiter_wakes_holds_it_back() -> None:
    gate = VersionGate()
    passing = asyncio.create_task(gate.passed())
    await _turn()
    gate.open()
    gate.close()
    await _turn()
    assert not passing.done()

    gate.open()
    await passing
