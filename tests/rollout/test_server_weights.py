"""The server and its weights: what it generates before, during and after a push."""

import asyncio
from typing import Any

import pytest

from protocol.errors import NeighbourError
from protocol.weights.controls import Attempt
from protocol.wire import messages as m
from tests.rollout.server_stage import Stage, attempt, push


async def test_server_generates_nothing_for_a_run_before_a_push_was_committed(stage: Stage) -> None:
    described = await stage.server.attach(stage.run())
    assert described["policy_version"] is None
    hello = await stage.coordinator.welcome()
    assert hello.policy_version is None
    assert (await stage.coordinator.next(m.Demand)).num_groups == 0
    stage.coordinator.lease("e0-a")
    await asyncio.sleep(0.1)
    assert stage.engine.requests == []

    await push(stage.server, 8)

    done = await stage.coordinator.next(m.TrajectoryDone)
    assert done.facts.oldest_version == 8
    assert done.facts.reward_parts == {"bundled": 0.5}
    assert done.facts.finish == "answer"
    assert stage.engine.calls == ["forget_weights", "prepare", "receive", "commit"]


async def test_turns_are_generated_while_a_push_is_received(stage: Stage) -> None:
    await stage.begin()
    await stage.server.prepare(by := attempt(), {})
    stage.coordinator.lease("e0-a")
    assert (await stage.coordinator.next(m.TrajectoryDone)).facts.oldest_version == 1
    await stage.server.receive(by)
    assert await stage.server.commit(by, 2, "digest") == 0.125
    await stage.server.serve(by, 2)
    stage.coordinator.lease("e0-b")
    assert (await stage.coordinator.next(m.TrajectoryDone)).facts.oldest_version == 2


async def test_new_turns_wait_for_the_commit_where_generation_stops_for_a_push(stage: Stage) -> None:
    stage.engine.generates_while_receiving = False
    await stage.begin()
    await stage.server.prepare(by := attempt(), {})
    stage.coordinator.lease("e0-a")
    await asyncio.sleep(0.1)
    assert stage.engine.requests == []
    await stage.server.receive(by)
    await stage.server.commit(by, 2, "digest")
    await stage.server.serve(by, 2)
    assert (await stage.coordinator.next(m.TrajectoryDone)).facts.oldest_version == 2


async def test_new_turns_wait_after_a_refused_commit_for_a_good_one(stage: Stage) -> None:
    await stage.begin()
    await stage.server.prepare(by := attempt(), {})
    await stage.server.receive(by)
    with pytest.raises(NeighbourError, match="weight digest differs"):
        await stage.server.commit(by, 2, "wrong")
    stage.coordinator.lease("e0-a")
    await asyncio.sleep(0.1)
    assert stage.engine.requests == []
    await push(stage.server, 3)
    assert (await stage.coordinator.next(m.TrajectoryDone)).facts.oldest_version == 3


async def test_leave_after_a_broken_push_does_not_reopen(stage: Stage) -> None:
    stage.engine.generates_while_receiving = False
    await stage.server.attach(stage.run())
    await stage.server.prepare(by := attempt(), {})
    await stage.server.receive(by)
    await stage.server.leave(by)
    await stage.coordinator.welcome()
    stage.coordinator.lease("e0-a")
    await asyncio.sleep(0.1)
    assert stage.engine.requests == []


async def test_probe_needs_verified_weights(stage: Stage) -> None:
    await stage.server.join_weights(by := attempt(), {}, 1.0)
    assert await stage.server.probe(by, [1, 2, 3]) == [-7.0, -7.0]
    stage.engine.generates_while_receiving = False
    await stage.server.prepare(by := attempt(), {})
    with pytest.raises(NeighbourError, match=r"^engine: holds no verified weights to probe$"):
        await stage.server.probe(by, [1, 2, 3])


async def test_run_that_takes_the_place_of_another_waits_for_its_own_push(stage: Stage) -> None:
    await stage.server.attach(stage.run())
    await stage.coordinator.welcome()  # or its Hello would be the next one's
    await push(stage.server, 1)
    await stage.server.attach(stage.run(run_id="other"))
    stage.coordinator.stamp["run_id"] = "other"
    await stage.coordinator.welcome()
    stage.coordinator.lease("e0-a")  # one that was on its way when the weights were given up
    await asyncio.sleep(0.1)
    assert stage.engine.requests == []


async def test_coordinator_is_told_of_new_weights_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.session.session._TICK_S", 60.0)  # the session looks by itself only then
    await stage.server.attach(stage.run())
    await stage.coordinator.welcome()
    assert (await stage.coordinator.next(m.Demand)).policy_version is None
    await push(stage.server, 8)
    assert (await stage.coordinator.next(m.Demand)).policy_version == 8


async def test_committed_version_is_told_and_written_with_only_once_it_is_served(stage: Stage) -> None:
    await stage.begin()
    while (await stage.coordinator.next(m.Demand)).policy_version != 1:
        pass
    await stage.server.prepare(by := attempt(), {})
    await stage.server.receive(by)
    await stage.server.commit(by, 2, "digest")
    while (demand := await stage.coordinator.next(m.Demand)).policy_version is not None:
        pass
    stage.coordinator.lease("e0-a")
    await asyncio.sleep(0.1)
    asked = list(stage.engine.requests)
    assert await stage.server.probe(by, [1, 2, 3]) == [-2.0, -2.0]
    await stage.server.serve(by, 2)

    assert (demand.num_groups, asked) == (0, [])
    assert (await stage.coordinator.next(m.TrajectoryDone)).facts.oldest_version == 2


async def commit_under_a_turn(stage: Stage, version: int) -> Attempt:
    """Have a turn be written by version 1, and commit this version meanwhile; returns whose push it is."""
    await stage.begin()
    stage.engine.is_slow = True
    stage.coordinator.lease("e0-a")
    async with asyncio.timeout(20.0):
        while not stage.engine.requests:
            await asyncio.sleep(0.01)
    await stage.server.prepare(by := attempt(), {})
    await stage.server.receive(by)
    await stage.server.commit(by, version, "digest")
    return by


async def test_turn_that_ends_while_its_version_is_pushed_once_more_waits_until_that_is_served(stage: Stage) -> None:
    by = await commit_under_a_turn(stage, 1)
    stage.engine.release()
    done = asyncio.ensure_future(stage.coordinator.next(m.TrajectoryDone))
    await asyncio.wait({done}, timeout=0.2)
    assert not done.done()

    await stage.server.serve(by, 1)

    assert (await done).facts.oldest_version == 1


@pytest.mark.parametrize("next_call", ["join_weights", "leave", "prepare"])
async def test_what_weights_wrote_that_nobody_served_is_given_up(stage: Stage, next_call: str) -> None:
    by = await commit_under_a_turn(stage, 2)
    by = by if next_call == "leave" else attempt()
    arguments: dict[str, tuple[Any, ...]] = {"join_weights": ({}, 1.0), "prepare": ({},)}
    await getattr(stage.server, next_call)(by, *arguments.get(next_call, ()))

    failed = await stage.coordinator.next(m.SampleFailed)
    assert failed.boundary == "engine"
    assert "was dropped: its weights differ from the learner's" in failed.detail
    assert stage.engine.calls.count("forget_weights") == 2  # once when the run was attached
    with pytest.raises(NeighbourError, match=r"^sluice-rollout-0: cannot serve version 2: it holds None$"):
        await stage.server.serve(by, 2)


async def test_version_older_than_one_that_was_served_is_refused_and_the_newer_one_stays_in_use(stage: Stage) -> None:
    await stage.begin(5)
    with pytest.raises(NeighbourError, match=r"^sluice-rollout-0: cannot commit version 3: it has served version 5$"):
        await push(stage.server, 3)
    stage.coordinator.lease("e0-a")
    assert (await stage.coordinator.next(m.TrajectoryDone)).facts.oldest_version == 5

    await push(stage.server, 5)  # the same once more: no server held it
    await stage.server.attach(stage.run(incarnation=2))  # that started from an older checkpoint
    await push(stage.server, 1, by=attempt(incarnation=2))
