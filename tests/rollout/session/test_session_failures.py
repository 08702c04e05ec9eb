"""Failed, late and repeated samples; a lost coordinator, and another one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protocol.errors import NeighbourError
from protocol.wire import messages as m
from protocol.wire.codec import Decoder, encode
from rollout.environments.base import Resources, SingleTurn
from rollout.session.outbox import FinishedSample, Key, Outbox
from rollout.session.session import RolloutSession
from tests.fakes.engines import ScriptedEngine
from tests.fakes.playing_session import make_player
from tests.fakes.rollout_fakes import ScriptedScorer, make_spec
from tests.protocol.wire.examples import make_trajectory
from tests.rollout.session.scene import playing, until


async def test_neighbours_failure_is_sent_as_a_failed_sample() -> None:
    async with playing() as scene:
        scene.scorer.reward = NeighbourError("reward:em", "answered 503", "/home/me/reward.py:6")
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a", attempt=2)
        failed = await scene.coordinator.next(m.SampleFailed)
        beat = await scene.coordinator.next(m.Heartbeat)

        assert (failed.group, failed.sample_index, failed.attempt) == ("e0-a", 0, 2)
        assert (failed.boundary, failed.detail) == ("reward:em", "answered 503")
        assert failed.place == "/home/me/reward.py:6"
        assert failed.num_model_tokens == len("4")
        assert beat.failures == {"reward:em": 1}
        scene.coordinator.acknowledge("e0-a", 0, "returned")
        await until(lambda: len(scene.session.outbox) == 0)


async def test_sample_of_a_dead_engine_has_not_failed_and_demand_is_0() -> None:
    async with playing() as scene:
        scene.engine.is_slow = True
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        await until(lambda: len(scene.engine.requests) == 1)
        scene.engine.die()
        while (await scene.coordinator.next(m.Demand)).num_groups:
            pass
        scene.coordinator.lease("e0-b")  # sent before the coordinator knew
        await until(lambda: len(scene.engine.requests) == 2)
        await scene.coordinator.next(m.Heartbeat)
        await scene.coordinator.next(m.Heartbeat)
        # The process will end, and both go back as leases of a dead server.
        assert (scene.session.num_samples, len(scene.session.outbox)) == (2, 0)


async def test_sample_that_outlives_its_lease_goes_back() -> None:
    async with playing(lease_timeout_s=0.1) as scene:
        scene.engine.is_slow = True
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        failed = await scene.coordinator.next(m.SampleFailed)
        assert failed.boundary == "lease"
        assert failed.detail == "e0-a/0/1 was not made within rollout.lease_timeout_s = 0.1 s"
        assert failed.num_model_tokens == 0


async def test_failed_sample_reports_the_tokens_of_its_finished_turns() -> None:
    async with playing(lease_timeout_s=0.5) as scene:
        scene.scorer.delay_s = 60.0
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        failed = await scene.coordinator.next(m.SampleFailed)
        assert (failed.boundary, failed.num_model_tokens) == ("lease", len("4"))


async def test_newer_attempt_replaces_a_running_one() -> None:
    async with playing() as scene:
        scene.engine.is_slow = True
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a", attempt=1)
        await until(lambda: len(scene.engine.requests) == 1)
        scene.coordinator.lease("e0-a", attempt=2)
        await until(lambda: len(scene.engine.requests) == 2)
        assert scene.engine.stats.num_in_flight == 1
        assert (scene.session.num_samples, scene.session.num_groups) == (1, 1)
        scene.engine.release()
        assert (await scene.coordinator.next(m.TrajectoryDone)).facts.attempt == 2
        assert scene.session.num_groups == 0


async def test_known_attempt_is_not_repeated() -> None:
    async with playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        await scene.coordinator.next(m.TrajectoryDone)
        scene.coordinator.lease("e0-a")
        scene.coordinator.lease("e0-b")
        await until(lambda: len(scene.session.outbox) == 2)
        assert len(scene.engine.requests) == 2


async def test_repeated_lease_of_a_finished_group_is_ignored() -> None:
    async with playing() as scene:
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a", attempt=2)
        await scene.coordinator.next(m.TrajectoryDone)
        scene.coordinator.acknowledge("e0-a", 0, "unknown")
        await until(lambda: len(scene.session.outbox) == 0)
        for attempt in (2, 1):
            scene.coordinator.lease("e0-a", attempt=attempt)
        scene.coordinator.lease("e0-b")
        await until(lambda: len(scene.session.outbox) == 1)
        assert len(scene.engine.requests) == 2


async def test_session_ends_at_the_coordinator_of_a_later_start() -> None:
    async with playing() as scene:
        scene.engine.is_slow = True
        await scene.coordinator.welcome()
        scene.coordinator.lease("e0-a")
        await until(lambda: scene.session.num_samples == 1)
        scene.coordinator.send(m.Refusal(run_id="run", incarnation=2, detail="this is run run, start 2"))

        assert await asyncio.wait_for(scene.task, 20.0) == (
            f"the coordinator at {scene.coordinator.address} refused: this is run run, start 2"
        )
        assert scene.session.num_samples == 0
        assert scene.engine.stats.num_in_flight == 0


async def test_messages_of_another_start_and_broken_ones_are_ignored() -> None:
    async with playing() as scene:
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


class RecordingChannel:
    """A channel that records the session's messages, and can be disconnected."""

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
async def _welcome_session(
    resend_s: float,
) -> "AsyncIterator[tuple[RecordingChannel, Outbox, list[float], Callable[[int], Any]]]":
    """Yield the channel of a welcome session, its outbox, its clock, and a function that runs its loop several times.

    The function returns the number of trajectories that were sent.
    """
    spec, channel, now = make_spec(), RecordingChannel(), [0.0]
    engine, scorer, outbox = ScriptedEngine(lambda context: "4"), ScriptedScorer(), Outbox(resend_s)
    player = make_player(engine, spec, SingleTurn, Resources(1), scorer)
    session = RolloutSession("s0", spec, channel, player, engine, scorer, outbox, clock=lambda: now[0])
    task = asyncio.create_task(session.run())

    async def turns(number: int) -> int:
        before = channel.num_sent(m.TrajectoryDone)
        for _ in range(number):
            session.wake()
            await asyncio.sleep(0.005)
        return channel.num_sent(m.TrajectoryDone) - before

    await until(lambda: channel.num_sent(m.Hello) == 1)
    channel.say(m.Done(run_id="run", incarnation=1))
    await until(lambda: session.is_welcome)
    yield channel, outbox, now, turns
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("is_silent", [False, True])
async def test_nothing_is_resent_without_a_coordinator(is_silent: bool) -> None:
    async with _welcome_session(resend_s=0.0) as (channel, outbox, now, turns):
        outbox.put(FinishedSample(Key("g", 0, 1, 1), make_trajectory("g", 0, "s0", 0)))
        assert await turns(9) > 3
        if is_silent:
            now[0] = 10.0
        else:
            channel.is_connected = False
            now[0] = 1.0  # the next heartbeat fails
        assert await turns(9) <= 1
        assert await turns(9) == 0

        channel.is_connected = True
        channel.say(m.Ping(run_id="run", incarnation=1, newest_lease=0))
        now[0] += 1.0
        assert await turns(9) > 3
        assert len(outbox) == 1


async def test_trajectory_is_sent_once_the_connection_is_back() -> None:
    async with _welcome_session(resend_s=1000.0) as (channel, outbox, now, turns):
        channel.is_connected = False
        outbox.put(FinishedSample(Key("g", 0, 1, 1), make_trajectory("g", 0, "s0", 0)))
        assert await turns(5) == 0
        channel.is_connected = True
        now[0] += 1.0
        assert await turns(9) == 1
