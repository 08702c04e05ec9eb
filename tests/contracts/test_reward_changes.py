"""A running run is given another reward endpoint by the command, then killed and started again.

Real: the coordinator behind its encrypted socket, the rollout session, the HTTP endpoints, the command, the ledger and
its audit. Scripted: what the engine writes, and the ranks, which only say that a step was taken.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import HttpUrl

from learner.audit.reward_sets import check_reward_sets, note_reward_sets
from learner.audit.run import AuditedRun
from protocol.settings.loader import save_settings
from protocol.settings.reward_sets import read_sets
from protocol.settings.run_spec import RunSpec, run_spec
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from protocol.wire.channel import AsyncDealerChannel
from rewards.endpoints import main
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import Resources
from rollout.environments.single_turn import SingleTurn
from rollout.episodes.player import EpisodePlayer
from rollout.neighbours.reward_client import RewardClient
from rollout.neighbours.served_rewards import ServedRewards
from rollout.session.outbox import Outbox
from rollout.session.session import RolloutSession
from tests.fakes.http_servers import Answer, Received, ScriptedServer, scripted_server
from tests.fakes.rollout_fakes import ScriptedEngine
from tests.fakes.running_coordinator import RUN_ID, RunningCoordinator, running_coordinator

_PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


def rewarding(value: float, delay_s: float = 0.0) -> Callable[[Received], Answer]:
    return lambda received: Answer({"rewards": [value] * len(received.body["query"])}, delay_s=delay_s)


async def until(is_so: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while not is_so():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {_PATIENCE_S:g} s") from None


class Playing:
    """A rollout session of one start of the run, and the ranks' part."""

    def __init__(self, run: RunningCoordinator, engine: ScriptedEngine, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._engine = engine
        self._stamp: dict[str, Any] = {"run_id": RUN_ID, "incarnation": run.coordinator.incarnation}

    async def train(self, step: int) -> None:
        """Take a step: ask for the batch, push, say that it was taken."""
        coordinator = self._run.coordinator
        asked = m.NextBatch(**self._stamp, step=step, rank=0)
        assigned = f"SELECT COUNT(*) FROM prompts WHERE state = 'assigned' AND step = {step}"  # noqa: S608

        def is_assigned() -> bool:
            # Asked again and again, as ranks do: a question that is not answered at once is put off.
            self._run.loop.submit(lambda c: c.receive("rank-0", asked, [], 0.0))
            return found(self._folder, assigned) == 2

        await until(is_assigned, f"the batch of step {step}")
        self._engine.policy_version = step
        stepped = m.Stepped(
            **self._stamp, step=step, policy_version=step, is_applied=True, detail="", metrics={"loss": 0.25}
        )
        self._run.loop.submit(lambda c: c.receive("rank-0", stepped, [], 0.0))
        await until(lambda: coordinator.step == step, f"the end of step {step}")


@asynccontextmanager
async def playing(
    run: RunningCoordinator, spec: RunSpec, version: int, outbox: Outbox, folder: Path
) -> AsyncIterator[Playing]:
    engine, gate = ScriptedEngine(lambda context: "4", version=version), VersionGate()
    gate.open()
    place = run.place
    client = RewardClient(spec.rewards.endpoints, spec.rewards.combine)
    async with ServedRewards(spec.reward_set, client, lambda one: RewardClient(one.endpoints, one.combine)) as rewards:
        player = EpisodePlayer(engine, gate, SingleTurn, Resources(1), rewards, spec.rollout, "s0")
        channel = AsyncDealerChannel(place.address, "s0", place.peer_keys, place.coordinator_key)
        session = RolloutSession("s0", spec, channel, player, engine, rewards, outbox, rewards=rewards)
        task = asyncio.create_task(session.run())
        try:
            yield Playing(run, engine, folder)
        finally:
            task.cancel()
            await asyncio.wait([task])
            channel.close()


def settings_of(folder: Path, url: str) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {
        "run": {"max_steps": 50},
        "rollout": {"group_size": 4},
        "learner": {"groups_per_step": 2, "max_staleness": 1},
        "rewards": {"endpoints": [{"name": "math", "url": str(HttpUrl(url))}]},
    }
    save_settings(Settings.model_validate(sections), folder / "settings.yaml")
    return sections


async def test_endpoints_are_changed_in_a_running_run_and_stay_changed_when_it_is_started_again(
    tmp_path: Path, server: ScriptedServer
) -> None:
    # Slow, so that samples are being scored when the change comes.
    sections = settings_of(tmp_path, server.script_by("old", rewarding(0.0, delay_s=0.05)))
    settings, outbox = Settings.model_validate(sections), Outbox()
    new = server.script_by("new", rewarding(1.0))
    with running_coordinator(tmp_path, sections, num_prompts=400) as run:
        first = run_spec(settings, RUN_ID, run.coordinator.incarnation, run.place.address)
        async with playing(run, first, version=0, outbox=outbox, folder=tmp_path) as begun:
            await begun.train(1)
            assert await asyncio.to_thread(main, [str(tmp_path), "set", f"math={new}"]) == 0
            await until(lambda: run.loop.status.reward_set == 2, "the coordinator takes set 2 up")
            step = 1
            while step < 12 and newest_of_step(tmp_path, step) < 2:
                step += 1
                await begun.train(step)
            assert newest_of_step(tmp_path, step) == 2
    # The command and its coordinator are gone; the server still has what it finished, and the endpoint of set 1 too.
    with running_coordinator(tmp_path, sections, num_prompts=400, last_step=step) as run:
        assert run.loop.status.reward_set == 2
        in_force = read_sets(tmp_path)[-1]
        spec = run_spec(settings, RUN_ID, run.coordinator.incarnation, run.place.address, in_force)
        num_asked = len(server.received["old"])
        async with playing(run, spec, version=step, outbox=outbox, folder=tmp_path) as resumed:
            await resumed.train(step + 1)
            await resumed.train(step + 2)
        assert len(server.received["old"]) == num_asked
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        audited = AuditedRun(tmp_path, settings, [], db, b"", [])
        assert list(check_reward_sets(audited)) == []
        assert note_reward_sets(audited)[0].startswith("Trained trajectories by reward set: set 1: ")
        wrong = "SELECT COUNT(*) FROM trajectories WHERE reward != reward_set - 1"
        assert db.execute(wrong).fetchone() == (0,)
        sizes = 'SELECT DISTINCT COUNT(*) FROM trajectories WHERE step IS NOT NULL GROUP BY "group"'
        assert db.execute(sizes).fetchall() == [(4,)]
        assert db.execute("SELECT COUNT(*) FROM prompts WHERE state = 'skipped'").fetchone() == (0,)


def newest_of_step(folder: Path, step: int) -> int:
    return found(folder, f"SELECT COALESCE(MAX(reward_set), 0) FROM trajectories WHERE step = {step}")  # noqa: S608


def found(folder: Path, query: str) -> int:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        return int(db.execute(query).fetchone()[0])
