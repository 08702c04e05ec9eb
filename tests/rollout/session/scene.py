"""A session with a scripted coordinator and a scripted engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from protocol.node.home import Keys
from rollout.environments.base import Resources, SingleTurn
from rollout.session.outbox import Outbox
from rollout.session.session import RolloutSession
from tests.fakes.engines import ScriptedEngine
from tests.fakes.playing_session import make_player, session_at_work
from tests.fakes.rollout_fakes import ScriptedCoordinator, ScriptedScorer, make_keys, make_spec


@dataclass
class Scene:
    """A running session and its surroundings."""

    coordinator: ScriptedCoordinator
    engine: ScriptedEngine
    scorer: ScriptedScorer
    session: RolloutSession
    task: "asyncio.Task[str]"
    keys: Keys


@asynccontextmanager
async def playing(
    keys: Keys | None = None, outbox: Outbox | None = None, incarnation: int = 1, **rollout: Any
) -> AsyncIterator[Scene]:
    keys, outbox = keys or make_keys(), Outbox(resend_s=0.5) if outbox is None else outbox
    coordinator = ScriptedCoordinator(keys, incarnation)
    spec = make_spec(coordinator.address, incarnation, **rollout)
    engine, scorer = ScriptedEngine(lambda context: "4", version=3), ScriptedScorer()
    player = make_player(engine, spec, SingleTurn, Resources(1), scorer)
    async with session_at_work(coordinator, keys, spec, player, engine, scorer, outbox) as at_work:
        yield Scene(coordinator, engine, scorer, at_work.session, at_work.task, keys)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not is_so():
            await asyncio.sleep(0.005)
