"""A session with a scripted coordinator and a scripted engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from protocol.node.home import Keys
from protocol.wire.channel import AsyncDealerChannel
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import Resources, SingleTurn
from rollout.episodes.player import EpisodePlayer
from rollout.session.outbox import Outbox
from rollout.session.session import RolloutSession
from tests.fakes.engines import ScriptedEngine
from tests.fakes.rollout_fakes import ScriptedCoordinator, ScriptedScorer, drop_counts, make_keys, make_spec


@dataclass
class Scene:
    """A running session and its surroundings."""

    coordinator: ScriptedCoordinator
    engine: ScriptedEngine
    scorer: ScriptedScorer
    session: RolloutSession
    task: "asyncio.Task[str]"
    keys: Keys


Playing = Callable[..., Any]


@asynccontextmanager
async def playing(
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
        drop_counts()
        coordinator.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not is_so():
            await asyncio.sleep(0.005)
