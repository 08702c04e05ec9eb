"""A session with a coordinator's real socket: leases, trajectories, demand and heartbeat."""

import asyncio
from collections.abc import Callable

import pytest

from protocol.wire import messages as m
from protocol.wire.trajectory import Trajectory
from tests.rollout.session.scene import Scene, playing, until


async def test_welcome_session_requests_groups() -> None:
    async with playing(max_groups_in_flight=5) as scene:
        hello = await scene.coordinator.welcome()
        demand = await scene.coordinator.next(m.Demand)

        assert hello == m.Hello(run_id="run", incarnation=1, server="s0", policy_version=3)
        assert demand == m.Demand(
            run_id="run", incarnation=1, num_groups=5, policy_version=3, heard_of_lease=0, leases={}
        )


async def test_greedy_samples_of_a_lease_are_greedy() -> None:
    async with playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("eval-0-a", kind="eval", num_samples=3, greedy_indices=[1])
        done = [(await scene.coordinator.next(m.TrajectoryDone)).facts for _ in range(3)]
        assert sorted((facts.sample_index, facts.is_greedy) for facts in done) == [(0, False), (1, True), (2, False)]
        assert sorted(request[1].greedy for request in scene.engine.requests) == [False, False, True]


async def test_session_sends_only_hello_before_it_is_welcome() -> None:
    async with playing() as scene:
        await scene.coordinator.next(m.Hello)
        with pytest.raises(TimeoutError):
            await scene.coordinator.next(m.Demand, timeout_s=1.5)  # a demand would be repeated each second


async def test_leased_group_is_made_and_kept_until_it_is_trained() -> None:
    async with playing() as scene:
        coordinator = scene.coordinator
        await coordinator.welcome()
        coordinator.lease("e0-a", num_samples=2)
        done = [await coordinator.next(m.TrajectoryDone) for _ in range(2)]

        assert sorted(message.facts.sample_index for message in done) == [0, 1]
        trajectory = Trajectory.from_buffers(done[0].facts, coordinator.buffers[-1])
        assert "".join(map(chr, trajectory.tokens[1:])) == "2+2=4"
        assert (trajectory.facts.reward, trajectory.facts.server, trajectory.facts.attempt) == (1.0, "s0", 1)
        assert trajectory.facts.oldest_version == 3

        coordinator.acknowledge("e0-a", 0, "accepted")
        coordinator.acknowledge("e0-a", 1, "accepted")
        await until(lambda: not list(scene.session.outbox.unanswered_keys()))
        assert len(scene.session.outbox) == 2
        coordinator.send(m.GroupsTrained(**coordinator.stamp, groups=["e0-a"]))
        await until(lambda: len(scene.session.outbox) == 0)


async def test_trajectory_without_an_ack_is_resent() -> None:
    async with playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        first = await scene.coordinator.next(m.TrajectoryDone)
        assert await scene.coordinator.next(m.TrajectoryDone) == first


async def test_demand_falls_with_each_group_and_rises_when_all_its_samples_are_done() -> None:
    async with playing(max_groups_in_flight=2) as scene:
        coordinator, engine = scene.coordinator, scene.engine
        engine.is_slow = True
        await coordinator.welcome()
        assert (await coordinator.next(m.Demand)).num_groups == 2
        coordinator.lease("e0-a", num_samples=3)
        assert (await _demand_when(scene, lambda demand: demand.num_groups != 2)).num_groups == 1
        engine.release()
        assert (await _demand_when(scene, lambda demand: demand.num_groups != 1)).num_groups == 2


async def _demand_when(scene: Scene, is_so: Callable[[m.Demand], bool]) -> m.Demand:
    """Return the next demand with this property; the session repeats its demand every second."""
    async with asyncio.timeout(20.0):
        while not is_so(demand := await scene.coordinator.next(m.Demand)):
            pass
    return demand


async def test_demand_names_the_newest_lease() -> None:
    async with playing() as scene:
        scene.engine.is_slow = True
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a", number=5, attempt=3)
        demand = await _demand_when(scene, lambda demand: demand.heard_of_lease == 5)
        assert demand.leases == {"e0-a": 3}
        scene.coordinator.send(m.Ping(**scene.coordinator.stamp, newest_lease=9))
        assert (await _demand_when(scene, lambda demand: demand.heard_of_lease == 9)).leases == {"e0-a": 3}
        scene.coordinator.lease("e0-b", number=7)  # older than the ping's
        demand = await _demand_when(scene, lambda demand: "e0-b" in demand.leases)
        assert demand.heard_of_lease == 9


async def test_demand_names_a_group_until_its_samples_are_acknowledged() -> None:
    async with playing(max_groups_in_flight=64) as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        await scene.coordinator.next(m.TrajectoryDone)
        demand = await scene.coordinator.next(m.Demand)
        assert (demand.num_groups, demand.leases) == (64, {"e0-a": 1})
        scene.coordinator.acknowledge("e0-a", 0, "accepted")
        assert (await _demand_when(scene, lambda demand: not demand.leases)).num_groups == 64


async def test_leases_beyond_the_room_wait() -> None:
    async with playing(max_groups_in_flight=1) as scene:
        coordinator, engine = scene.coordinator, scene.engine
        engine.is_slow = True
        await coordinator.welcome()
        coordinator.lease("e0-a")
        coordinator.lease("e0-b")
        await until(lambda: scene.session.num_groups == 2)
        await asyncio.sleep(0.05)
        assert scene.session.num_samples == 1
        engine.release()
        groups = [(await coordinator.next(m.TrajectoryDone)).facts.group for _ in range(2)]
        assert groups == ["e0-a", "e0-b"]


@pytest.mark.parametrize("reason", ["unsynced", "no reward"])
async def test_demand_is_0_while_no_sample_can_finish(reason: str) -> None:
    async with playing() as scene:
        if reason == "unsynced":
            scene.engine.policy_version = None
        else:
            scene.scorer.is_accepting = False
        await scene.coordinator.welcome()
        demand = await scene.coordinator.next(m.Demand)
        assert demand.num_groups == 0

        scene.engine.policy_version, scene.scorer.is_accepting = 4, True
        scene.session.wake()
        demand = await _demand_when(scene, lambda demand: demand.num_groups > 0)
        assert (demand.num_groups, demand.policy_version) == (32, 4)


async def test_heartbeat_counts_groups_samples_and_tokens() -> None:
    async with playing() as scene:
        await scene.coordinator.welcome()
        first = await scene.coordinator.next(m.Heartbeat)
        assert (first.num_groups, first.num_running, first.num_waiting, first.generated_tokens) == (0, 0, 0, 0)
        scene.coordinator.lease("e0-a", num_samples=3)
        for _ in range(3):
            await scene.coordinator.next(m.TrajectoryDone)
        scene.engine.is_slow = True
        scene.coordinator.lease("e0-b", num_samples=2)
        await until(lambda: scene.engine.stats.num_in_flight == 2)
        while (second := await scene.coordinator.next(m.Heartbeat)).num_running < 2:
            pass  # sent before
        assert second.num_groups == 1
        assert (second.num_running, second.num_waiting, second.generated_tokens) == (2, 0, 3)
        assert (second.policy_version, second.failures) == (3, {})


async def test_finished_trajectories_go_to_the_next_start_of_the_learner() -> None:
    async with playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        await scene.coordinator.next(m.TrajectoryDone)
        scene.coordinator.acknowledge("e0-a", 0, "accepted")
        await until(lambda: not list(scene.session.outbox.unanswered_keys()))
        outbox, keys = scene.session.outbox, scene.keys

    async with playing(keys=keys, outbox=outbox, incarnation=2) as scene:
        await scene.coordinator.welcome()
        done = await scene.coordinator.next(m.TrajectoryDone)
        assert (done.incarnation, done.facts.group) == (2, "e0-a")
        scene.coordinator.acknowledge("e0-a", 0, "unknown")
        await until(lambda: len(scene.session.outbox) == 0)
