"""The server while a learner rank trains on its device: what is generated before, during and after."""

import asyncio

import pytest

from protocol.errors import NeighbourError
from protocol.wire import messages as m
from tests.rollout.server_stage import Stage, attempt, push, sleep_and_push


async def test_no_turn_begins_while_the_server_sleeps_and_one_in_flight_goes_on_when_it_is_awake(stage: Stage) -> None:
    await stage.begin()
    await stage.server.sleep(attempt())
    stage.coordinator.lease("e0-a")
    await asyncio.sleep(0.1)
    assert stage.engine.requests == []

    await stage.server.wake(attempt())
    assert (await stage.coordinator.next(m.TrajectoryDone)).facts.oldest_version == 1


async def test_a_version_that_came_in_its_sleep_is_used_once_the_server_is_awake_and_was_found_right(
    stage: Stage,
) -> None:
    await stage.begin()
    by = await sleep_and_push(stage.server, 2)
    await stage.server.wake(attempt())
    stage.coordinator.lease("e0-a")
    await asyncio.sleep(0.1)
    assert stage.engine.requests == []

    await stage.server.serve(by, 2)
    assert (await stage.coordinator.next(m.TrajectoryDone)).facts.oldest_version == 2


async def test_a_call_to_sleep_that_comes_after_a_later_one_to_wake_is_refused(stage: Stage) -> None:
    await stage.server.attach(stage.run())
    late = attempt()
    await stage.server.wake(attempt())
    with pytest.raises(NeighbourError, match="is over"):
        await stage.server.sleep(late)
    assert "sleep" not in stage.engine.calls


async def test_a_run_that_attaches_to_a_sleeping_server_finds_it_awake(stage: Stage) -> None:
    await stage.server.attach(stage.run())
    await stage.server.sleep(attempt())
    await stage.server.attach(stage.run(incarnation=2))
    assert stage.engine.calls[-2:] == ["wake", "forget_weights"]

    await push(stage.server, 1, attempt(incarnation=2))
    assert (await stage.server.describe())["policy_version"] == 1


async def test_a_learner_that_leaves_a_sleeping_server_does_not_have_it_begin_turns(stage: Stage) -> None:
    await stage.begin(1, by := attempt())
    await stage.server.sleep(attempt())
    await stage.server.leave(by)
    stage.coordinator.lease("e0-a")
    await asyncio.sleep(0.1)
    assert stage.engine.requests == []
