"""A session against a coordinator's real socket: what it says, what it makes, what it does when told off."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from protocol.errors import NeighbourError
from protocol.node.home import Keys
from protocol.wire import messages as m
from protocol.wire.channel import AsyncDealerChannel
from protocol.wire.codec import Decoder, encode
from protocol.wire.trajectory import Trajectory
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import Resources
from rollout.environments.single_turn import SingleTurn
from rollout.episodes.player import EpisodePlayer
from rollout.session.outbox import Finished, Key, Outbox
from rollout.session.session import RolloutSession
from tests.fakes.rollout_fakes import ScriptedCoordinator, ScriptedEngine, ScriptedScorer, make_keys, make_spec
from tests.protocol.wire.examples import make_trajectory


@dataclass
class Scene:
    """A session at work, with everything around it."""

    coordinator: ScriptedCoordinator
    engine: ScriptedEngine
    scorer: ScriptedScorer
    session: RolloutSession
    task: "asyncio.Task[str]"
    keys: Keys


Playing = Callable[..., Any]


@asynccontextmanager
async def _playing(
    coordinator: ScriptedCoordinator | None = None,
    keys: Keys | None = None,
    outbox: Outbox | None = None,
    incarnation: int = 1,
    **rollout: Any,
) -> AsyncIterator[Scene]:
    keys = keys or make_keys()
    coordinator = coordinator or ScriptedCoordinator(keys, incarnation)
    spec = make_spec(coordinator.address, incarnation, **rollout)
    engine, scorer, gate = ScriptedEngine(lambda context: "4", version=3), ScriptedScorer(), VersionGate()
    gate.open()
    player = EpisodePlayer(engine, gate, SingleTurn, Resources(1), scorer, spec.rollout, "s0")
    channel = AsyncDealerChannel(coordinator.address, "s0", keys.peer, keys.coordinator.public)
    outbox = Outbox(resend_s=0.5) if outbox is None else outbox
    session = RolloutSession("s0", spec, channel, player, engine, scorer, outbox)
    task = asyncio.create_task(session.run())
    try:
        yield Scene(coordinator, engine, scorer, session, task, keys)
    finally:
        task.cancel()
        await asyncio.wait([task])
        channel.close()
        coordinator.close()


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not is_so():
            await asyncio.sleep(0.005)


async def test_session_greets_and_asks_for_groups_once_it_is_welcome() -> None:
    async with _playing(max_groups_in_flight=5) as scene:
        hello = await scene.coordinator.welcome()
        demand = await scene.coordinator.next(m.Demand)

        assert hello == m.Hello(run_id="run", incarnation=1, server="s0", policy_version=3)
        assert demand == m.Demand(
            run_id="run", incarnation=1, num_groups=5, policy_version=3, heard_of_lease=0, leases={}
        )


async def test_session_makes_the_samples_greedy_that_the_lease_names() -> None:
    async with _playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("eval-0-a", kind="eval", num_samples=3, greedy_indices=[1])
        done = [(await scene.coordinator.next(m.TrajectoryDone)).facts for _ in range(3)]
        assert sorted((facts.sample_index, facts.is_greedy) for facts in done) == [(0, False), (1, True), (2, False)]
        assert sorted(request[1].greedy for request in scene.engine.requests) == [False, False, True]


async def test_session_says_nothing_but_hello_before_it_is_welcome() -> None:
    async with _playing() as scene:
        await scene.coordinator.next(m.Hello)
        with pytest.raises(TimeoutError):
            await scene.coordinator.next(m.Demand, timeout_s=0.6)


async def test_session_makes_a_leased_group_and_keeps_it_until_it_is_trained() -> None:
    async with _playing() as scene:
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
        await _until(lambda: scene.session.outbox.num_unanswered == 0)
        assert len(scene.session.outbox) == 2
        coordinator.send(m.Trained(**coordinator.stamp, groups=["e0-a"]))
        await _until(lambda: len(scene.session.outbox) == 0)


async def test_session_sends_a_trajectory_again_when_no_ack_comes() -> None:
    async with _playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        first = await scene.coordinator.next(m.TrajectoryDone)
        assert await scene.coordinator.next(m.TrajectoryDone) == first


async def test_demand_falls_with_each_group_and_rises_when_all_its_samples_are_done() -> None:
    async with _playing(max_groups_in_flight=2) as scene:
        coordinator, engine = scene.coordinator, scene.engine
        engine.is_slow = True
        await coordinator.welcome()
        assert (await coordinator.next(m.Demand)).num_groups == 2
        coordinator.lease("e0-a", num_samples=3)
        assert (await coordinator.next(m.Demand)).num_groups == 1
        engine.release()
        assert (await coordinator.next(m.Demand)).num_groups == 2


async def _demand_when(scene: Scene, is_so: Callable[[m.Demand], bool]) -> m.Demand:
    async with asyncio.timeout(5.0):
        while not is_so(demand := await scene.coordinator.next(m.Demand)):
            pass
    return demand


async def test_demand_tells_the_newest_lease_that_was_heard_of() -> None:
    async with _playing() as scene:
        scene.engine.is_slow = True
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a", number=5, attempt=3)
        demand = await _demand_when(scene, lambda demand: demand.heard_of_lease == 5)
        assert demand.leases == {"e0-a": 3}
        scene.coordinator.send(m.Ping(**scene.coordinator.stamp, newest_lease=9))
        assert (await _demand_when(scene, lambda demand: demand.heard_of_lease == 9)).leases == {"e0-a": 3}
        scene.coordinator.lease("e0-b", number=7)  # older than what the ping told
        demand = await _demand_when(scene, lambda demand: "e0-b" in demand.leases)
        assert demand.heard_of_lease == 9


async def test_demand_names_a_group_until_its_samples_are_answered_for() -> None:
    async with _playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        await scene.coordinator.next(m.TrajectoryDone)
        demand = await scene.coordinator.next(m.Demand)
        assert (demand.num_groups, demand.leases) == (64, {"e0-a": 1})
        scene.coordinator.acknowledge("e0-a", 0, "accepted")
        assert (await _demand_when(scene, lambda demand: not demand.leases)).num_groups == 64


async def test_session_holds_leases_beyond_its_room() -> None:
    async with _playing(max_groups_in_flight=1) as scene:
        coordinator, engine = scene.coordinator, scene.engine
        engine.is_slow = True
        await coordinator.welcome()
        coordinator.lease("e0-a")
        coordinator.lease("e0-b")
        await _until(lambda: scene.session.num_groups == 2)
        await asyncio.sleep(0.05)
        assert scene.session.num_samples == 1
        engine.release()
        groups = [(await coordinator.next(m.TrajectoryDone)).facts.group for _ in range(2)]
        assert groups == ["e0-a", "e0-b"]


@pytest.mark.parametrize("reason", ["unsynced", "no reward"])
async def test_session_asks_for_nothing_that_it_could_not_finish(reason: str) -> None:
    async with _playing() as scene:
        if reason == "unsynced":
            scene.engine.policy_version = None
        else:
            scene.scorer.is_accepting = False
        await scene.coordinator.welcome()
        demand = await scene.coordinator.next(m.Demand)
        assert demand.num_groups == 0

        scene.engine.policy_version, scene.scorer.is_accepting = 4, True
        scene.session.wake()
        demand = await scene.coordinator.next(m.Demand, timeout_s=0.5)
        assert (demand.num_groups, demand.policy_version) == (64, 4)


async def test_neighbours_failure_goes_back_as_a_failed_sample() -> None:
    async with _playing() as scene:
        scene.scorer.reward = NeighbourError("reward:em", "answered 503")
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a", attempt=2)
        failed = await scene.coordinator.next(m.SampleFailed)
        beat = await scene.coordinator.next(m.Heartbeat)

        assert (failed.group, failed.sample_index, failed.attempt) == ("e0-a", 0, 2)
        assert (failed.boundary, failed.detail) == ("reward:em", "answered 503")
        assert failed.num_model_tokens == len("4")
        assert beat.failures == {"reward:em": 1}
        scene.coordinator.acknowledge("e0-a", 0, "returned")
        await _until(lambda: len(scene.session.outbox) == 0)


async def test_sample_that_outlives_its_lease_goes_back() -> None:
    async with _playing(lease_timeout_s=0.1) as scene:
        scene.engine.is_slow = True
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        failed = await scene.coordinator.next(m.SampleFailed)
        assert failed.boundary == "lease"
        assert failed.detail == "e0-a/0/1 was not made within rollout.lease_timeout_s = 0.1 s"
        assert failed.num_model_tokens == 0


async def test_sample_that_outlives_its_lease_tells_what_was_written_of_it() -> None:
    async with _playing(lease_timeout_s=0.2) as scene:
        scene.scorer.delay_s = 60.0
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        failed = await scene.coordinator.next(m.SampleFailed)
        assert (failed.boundary, failed.num_model_tokens) == ("lease", len("4"))


async def test_newer_attempt_takes_the_place_of_a_running_one() -> None:
    async with _playing() as scene:
        scene.engine.is_slow = True
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a", attempt=1)
        await _until(lambda: len(scene.engine.requests) == 1)
        scene.coordinator.lease("e0-a", attempt=2)
        await _until(lambda: len(scene.engine.requests) == 2)
        assert scene.engine.stats.num_in_flight == 1
        assert (scene.session.num_samples, scene.session.num_groups) == (1, 1)
        scene.engine.release()
        assert (await scene.coordinator.next(m.TrajectoryDone)).facts.attempt == 2
        assert scene.session.num_groups == 0


async def test_attempt_that_is_known_is_not_made_twice() -> None:
    async with _playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        await scene.coordinator.next(m.TrajectoryDone)
        scene.coordinator.lease("e0-a")
        scene.coordinator.lease("e0-b")
        await _until(lambda: len(scene.session.outbox) == 2)
        assert len(scene.engine.requests) == 2


async def test_lease_that_comes_again_after_its_samples_have_left_is_of_no_use() -> None:
    async with _playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a", attempt=2)
        await scene.coordinator.next(m.TrajectoryDone)
        scene.coordinator.acknowledge("e0-a", 0, "unknown")
        await _until(lambda: len(scene.session.outbox) == 0)
        for attempt in (2, 1):
            scene.coordinator.lease("e0-a", attempt=attempt)
        scene.coordinator.lease("e0-b")
        await _until(lambda: len(scene.session.outbox) == 1)
        assert len(scene.engine.requests) == 2


async def test_heartbeat_tells_what_the_server_does() -> None:
    async with _playing() as scene:
        await scene.coordinator.welcome()
        first = await scene.coordinator.next(m.Heartbeat)
        assert (first.num_groups, first.num_running, first.num_waiting, first.generated_tokens) == (0, 0, 0, 0)
        scene.coordinator.lease("e0-a", num_samples=3)
        for _ in range(3):
            await scene.coordinator.next(m.TrajectoryDone)
        scene.engine.is_slow = True
        scene.coordinator.lease("e0-b", num_samples=2)
        second = await scene.coordinator.next(m.Heartbeat)
        assert second.num_groups == 1
        assert (second.num_running, second.num_waiting, second.generated_tokens) == (2, 0, 3)
        assert (second.policy_version, second.failures) == (3, {})


async def test_finished_trajectories_are_sent_to_the_next_start_of_the_learner() -> None:
    async with _playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        await scene.coordinator.next(m.TrajectoryDone)
        scene.coordinator.acknowledge("e0-a", 0, "accepted")
        await _until(lambda: scene.session.outbox.num_unanswered == 0)
        outbox, keys = scene.session.outbox, scene.keys

    async with _playing(keys=keys, outbox=outbox, incarnation=2) as scene:
        await scene.coordinator.welcome()
        done = await scene.coordinator.next(m.TrajectoryDone)
        assert (done.incarnation, done.facts.group) == (2, "e0-a")
        scene.coordinator.acknowledge("e0-a", 0, "unknown")
        await _until(lambda: len(scene.session.outbox) == 0)


async def test_session_ends_when_the_coordinator_is_of_a_later_start() -> None:
    async with _playing() as scene:
        scene.engine.is_slow = True
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        await _until(lambda: scene.session.num_samples == 1)
        scene.coordinator.send(m.Refused(run_id="run", incarnation=2, detail="this is run run, start 2"))

        assert await asyncio.wait_for(scene.task, 5.0) == (
            f"the coordinator at {scene.coordinator.address} refused: this is run run, start 2"
        )
        assert scene.session.num_samples == 0
        assert scene.engine.stats.num_in_flight == 0


async def test_messages_of_another_start_and_broken_ones_are_not_used() -> None:
    async with _playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.stamp["incarnation"] = 9
        scene.coordinator.lease("e0-old")
        scene.coordinator.send(m.Wait(run_id="run", incarnation=1, detail="for a rank"))
        scene.coordinator.stamp["incarnation"] = 1
        scene.coordinator.lease("e0-a")
        done = await scene.coordinator.next(m.TrajectoryDone)
        assert done.facts.group == "e0-a"
        assert len(scene.engine.requests) == 1
        assert scene.session.failures.totals == {"coordinator": 1}


class Hearing:
    """A coordinator's side that notes what it is sent, answers when it is told to, and may be out of reach."""

    def __init__(self) -> None:
        self.is_connected = True
        self.sent: list[m.Message] = []
        self._answers: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._decoder: Decoder[m.Message] = Decoder(m.ToCoordinator)

    def say(self, message: m.Message) -> None:
        self._answers.put_nowait(encode(message))

    async def send(self, frames: list[bytes]) -> bool:
        if self.is_connected:
            self.sent.append(self._decoder.decode(frames)[0])
        return self.is_connected

    async def receive(self, timeout_s: float) -> list[bytes] | None:
        return await self._answers.get()

    def num_sent(self, kind: type[m.Message]) -> int:
        return sum(isinstance(message, kind) for message in self.sent)


@asynccontextmanager
async def _heard(resend_s: float) -> "AsyncIterator[tuple[Hearing, Outbox, list[float], Callable[[int], Any]]]":
    """Yield the coordinator's side of a welcomed session, its outbox, its clock, and what turns its loop so often.

    The last one returns how many trajectories were sent meanwhile.
    """
    spec, hearing, now = make_spec(), Hearing(), [0.0]
    engine, scorer, gate = ScriptedEngine(lambda context: "4"), ScriptedScorer(), VersionGate()
    gate.open()
    player = EpisodePlayer(engine, gate, SingleTurn, Resources(1), scorer, spec.rollout, "s0")
    outbox = Outbox(resend_s)
    session = RolloutSession("s0", spec, hearing, player, engine, scorer, outbox, clock=lambda: now[0])
    task = asyncio.create_task(session.run())

    async def turns(number: int) -> int:
        before = hearing.num_sent(m.TrajectoryDone)
        for _ in range(number):
            session.wake()
            await asyncio.sleep(0.005)
        return hearing.num_sent(m.TrajectoryDone) - before

    await _until(lambda: hearing.num_sent(m.Hello) == 1)
    hearing.say(m.Done(run_id="run", incarnation=1))
    await _until(lambda: session.is_welcome)
    yield hearing, outbox, now, turns
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("is_silent", [False, True])
async def test_session_sends_nothing_again_while_nobody_hears_it(is_silent: bool) -> None:
    async with _heard(resend_s=0.0) as (hearing, outbox, now, turns):
        outbox.put(Finished(Key("g", 0, 1, 1), make_trajectory("g", 0, "s0", 0)))
        assert await turns(9) > 3
        if is_silent:
            now[0] = 10.0
        else:
            hearing.is_connected = False
            now[0] = 1.0  # the next heartbeat finds that it cannot go out
        assert await turns(9) <= 1
        assert await turns(9) == 0

        hearing.is_connected = True
        hearing.say(m.Ping(run_id="run", incarnation=1, newest_lease=0))
        now[0] += 1.0
        assert await turns(9) > 3
        assert len(outbox) == 1


async def test_trajectory_made_without_a_connection_is_sent_as_soon_as_there_is_one() -> None:
    async with _heard(resend_s=1000.0) as (hearing, outbox, now, turns):
        hearing.is_connected = False
        outbox.put(Finished(Key("g", 0, 1, 1), make_trajectory("g", 0, "s0", 0)))
        assert await turns(5) == 0
        hearing.is_connected = True
        now[0] += 1.0
        assert await turns(9) == 1
