"""A real session between a scripted coordinator's real socket and whatever neighbours a test brings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from protocol.node.home import Keys
from protocol.settings.run_spec import RunSpec
from protocol.wire import messages as m
from protocol.wire.channel import AsyncDealerChannel
from protocol.wire.trajectory import Trajectory
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import MakeEnvironment, Resources, SingleTurn
from rollout.episodes.conversation import Scorer
from rollout.episodes.player import EpisodePlayer
from rollout.session.outbox import Outbox
from rollout.session.session import RolloutSession
from tests.fakes.engines import ScriptedEngine
from tests.fakes.rollout_fakes import ScriptedCoordinator, ScriptedScorer, drop_counts, make_keys, make_spec


@dataclass
class PlayingSession:
    """A session that was welcomed, and the coordinator that it speaks to."""

    coordinator: ScriptedCoordinator
    session: RolloutSession
    task: "asyncio.Task[str]"

    async def made(self, group: str, **lease: Any) -> m.SampleFailed | Trajectory:
        """Lease one sample and return what became of it."""
        self.coordinator.lease(group, **lease)
        async with asyncio.timeout(10.0):
            while True:
                message = await self.coordinator.next(m.Message)
                if isinstance(message, m.SampleFailed) and message.group == group:
                    return message
                if isinstance(message, m.TrajectoryDone) and message.facts.group == group:
                    return Trajectory.from_buffers(message.facts, self.coordinator.buffers[-1])


@asynccontextmanager
async def session_at_work(
    coordinator: ScriptedCoordinator,
    keys: Keys,
    spec: RunSpec,
    player: Any,
    engine: ScriptedEngine,
    services: Any,
    outbox: Outbox | None = None,
) -> AsyncIterator[PlayingSession]:
    """Yield the session "s0", which nobody has welcomed; it and its coordinator's socket are closed afterwards."""
    channel = AsyncDealerChannel(coordinator.address, "s0", keys.peer, keys.coordinator.public)
    session = RolloutSession("s0", spec, channel, player, engine, services, Outbox() if outbox is None else outbox)
    task = asyncio.create_task(session.run())
    try:
        yield PlayingSession(coordinator, session, task)
    finally:
        task.cancel()
        await asyncio.wait([task])
        channel.close()
        drop_counts()
        coordinator.close()


def make_player(
    engine: ScriptedEngine, spec: RunSpec, environment: MakeEnvironment, resources: Resources, scorer: Scorer
) -> EpisodePlayer:
    """Return the player "s0" of a run, whose engine has its weights."""
    gate = VersionGate()
    gate.open()
    return EpisodePlayer(engine, gate, environment, resources, scorer, spec.rollout, "s0")


@asynccontextmanager
async def playing_session(
    engine: ScriptedEngine,
    environment: MakeEnvironment = SingleTurn,
    resources: Resources | None = None,
    scorer: Scorer | None = None,
    keeps_turns: bool = True,
    **rollout: Any,
) -> AsyncIterator[PlayingSession]:
    """Yield a session that plays `environment` with this engine and this scorer.

    keeps_turns: as `ScriptedCoordinator`'s.
    """
    keys, scorer = make_keys(), scorer or ScriptedScorer()
    coordinator = ScriptedCoordinator(keys, keeps_turns=keeps_turns)
    spec = make_spec(coordinator.address, **rollout)
    player = make_player(engine, spec, environment, resources or Resources(3), scorer)
    async with session_at_work(coordinator, keys, spec, player, engine, scorer) as playing:
        await coordinator.welcome()
        yield playing
