"""A run with real coordinator, sockets, sessions and players around a scripted engine, for neighbours that misbehave.

The engine's pace
bounds the samples per second, so that a rate is a fact about what the neighbours let through.
"""

import asyncio
import functools
import itertools
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from learner.coordinator.coordinator import Coordinator
from learner.coordinator.loop import CoordinatorLoop
from learner.coordinator.steps.record import RunRecord
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from learner.rank.coordinator_client import CoordinatorClient
from protocol.node.home import Keys
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings
from protocol.wire.channel import AsyncDealerChannel, DealerChannel, RouterChannel
from protocol.wire.trajectory import Trajectory
from rollout.engine.generation import Generation, Sampling
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import MakeEnvironment, Resources
from rollout.episodes.conversation import Scorer
from rollout.episodes.player import EpisodePlayer
from rollout.neighbours.retriever_client import RetrieverClient
from rollout.session.outbox import Outbox
from rollout.session.session import Neighbours, RolloutSession
from tests.fakes.engines import CharacterTokenizer, ScriptedEngine
from tests.fakes.rollout_fakes import make_keys

GROUP_SIZE = 4
GROUPS_PER_STEP = 8
Write = Callable[[str, int], str]
"""(context, number of the generation) -> what the policy writes."""


@dataclass(frozen=True)
class Seat:
    """What one rollout server has beside its engine."""

    scorer: Scorer
    resources: Resources
    services: Neighbours
    make_environment: MakeEnvironment


@dataclass
class Timeline:
    """(time, samples finished, attempts at neighbours), ten times a second."""

    rows: list[tuple[float, int, int]] = field(default_factory=list)

    def rate(self, start: float, end: float, column: int = 1) -> float:
        """Return finished samples (column 2: attempts) per second between two times."""
        first, last = self._at(start), self._at(end)
        return (last[column] - first[column]) / max(1e-9, last[0] - first[0])

    def back_s(self, since: float, rate: float, window_s: float) -> float:
        """Return how long after `since` a window began that reached `rate`; infinity when none did."""
        ends = [row[0] for row in self.rows if row[0] >= since and row[0] + window_s <= self.rows[-1][0]]
        return next((t - since for t in ends if self.rate(t, t + window_s) >= rate), float("inf"))

    def _at(self, when: float) -> tuple[float, int, int]:
        return min(self.rows, key=lambda row: abs(row[0] - when))


@dataclass
class Outcome:
    """What the rank was given: (text, reward, parts) of each trajectory by its place, and the coordinator's books."""

    trained: dict[tuple[str, int], tuple[str, float, dict[str, float]]] = field(default_factory=dict)
    num_trained_twice: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    prompts: dict[str, int] = field(default_factory=dict)
    dead_letters: list[str] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)


class Place(NamedTuple):
    """Where a run's coordinator is."""

    address: str  # tcp://HOST:PORT
    keys: Keys  # of its peers and of itself


Opened = tuple["asyncio.Task[str]", AsyncDealerChannel]
"""A session at work, and its socket."""


class RateLimitedEngine(ScriptedEngine):
    """Starts at most `pace` generations a second, and writes by the generation's number."""

    def __init__(self, write: Write, pace: float) -> None:
        numbers = itertools.count()
        super().__init__(lambda context: write(context, next(numbers)))
        self._interval_s = 1.0 / pace
        self._next_at = 0.0

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        now = time.monotonic()
        # Time that nobody used is not made up for: the pace is a bound at every moment.
        self._next_at = max(self._next_at + self._interval_s, now)
        await asyncio.sleep(self._next_at - now)
        self.requests.clear()
        return await super().generate(prompt_tokens, sampling, request_id)


async def play_run(
    seats: Sequence[Seat],
    write: Write,
    num_groups: int,
    pace: float,
    progress: Callable[[], tuple[int, int]],
    during: Callable[[], Awaitable[None]],
) -> Outcome:
    """Return what became of a run of num_groups prompts; `during()` is awaited beside it.

    pace: generations a second of each server. progress: samples finished and attempts at neighbours so far.
    """
    settings = run_settings(num_groups, max_response_tokens=64, max_context_tokens=1024)
    engines = [RateLimitedEngine(write, pace) for _ in seats]
    outcome = Outcome()

    async def open_sessions(place: Place) -> list[Opened]:
        return [
            open_session(f"s{i}", seat, engine, settings, place)
            for i, (seat, engine) in enumerate(zip(seats, engines, strict=True))
        ]

    async def watched() -> None:
        watching = asyncio.create_task(_watch(outcome.timeline, progress))
        await during()
        watching.cancel()

    await coordinated(settings, num_groups, engines, open_sessions, watched, functools.partial(_note, outcome), outcome)
    return outcome


def run_settings(num_groups: int, **rollout: Any) -> Settings:
    """Return the settings of a run over num_groups prompts; changes go into its rollout settings."""
    return Settings.model_validate(
        {
            "run": {"max_steps": num_groups // GROUPS_PER_STEP},
            # Few groups, so that no queue in front of the engine hides what the neighbours do.
            "rollout": {"group_size": GROUP_SIZE, "max_groups_in_flight": 12, **rollout},
            "learner": {"groups_per_step": GROUPS_PER_STEP, "max_staleness": 15},
        }
    )


async def coordinated(
    settings: Settings,
    num_groups: int,
    engines: Sequence[ScriptedEngine],
    open_sessions: Callable[["Place"], Awaitable[list["Opened"]]],
    during: Callable[[], Awaitable[None]],
    note: Callable[[Trajectory], None],
    outcome: Outcome,
) -> None:
    """Run a coordinator and a rank through all prompts, with whatever sessions are opened; the books go to `outcome`.

    during: awaited beside the run. note: is given each trajectory that the rank is.
    """
    keys = make_keys()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        prompts = [Prompt(f"p{i}", f"question {i}: ", f"answer {i}", {}) for i in range(num_groups)]
        coordinator = Coordinator(settings, "chaos", ledger, prompts, [], RunRecord(Path(folder), 0), last_step=0)
        router = RouterChannel("127.0.0.1", keys.coordinator, [keys.peer.public])
        loop = CoordinatorLoop(coordinator, router)
        loop.start()
        place = Place(router.address, keys)
        rank = threading.Thread(target=_train, args=(place, engines, note))
        rank.start()
        sessions = await open_sessions(place)
        await asyncio.gather(asyncio.to_thread(rank.join), during())
        for task, channel in sessions:
            task.cancel()
            await asyncio.wait([task])
            channel.close()
        loop.close()
        ledger.close()
        outcome.counts = coordinator.counts
        _read_books(Path(folder) / "ledger.sqlite", outcome)


async def under_way(progress: Callable[[], tuple[int, int]]) -> None:
    """Return once a step's worth of samples is finished."""
    while progress()[0] < GROUP_SIZE * GROUPS_PER_STEP:
        await asyncio.sleep(0.05)


def open_session(name: str, seat: Seat, engine: ScriptedEngine, settings: Settings, place: Place) -> Opened:
    """Return a session at work."""
    spec = run_spec(settings, "chaos", 1, place.address)
    gate = VersionGate()
    gate.open()
    player = EpisodePlayer(engine, gate, seat.make_environment, seat.resources, seat.scorer, spec.rollout, name)
    channel = AsyncDealerChannel(place.address, name, place.keys.peer, place.keys.coordinator.public)
    session = RolloutSession(name, spec, channel, player, engine, seat.services, Outbox())
    return asyncio.create_task(session.run()), channel


def search_at(client: RetrieverClient) -> Callable[[str], Awaitable[list[str]]]:
    """Return the search of environments that asks this client."""

    async def search(query: str) -> list[str]:
        return [passage.contents for passage in await client.search(query)]

    return search


def _train(place: Place, engines: Sequence[ScriptedEngine], note: Callable[[Trajectory], None]) -> None:
    """Take every batch of the run, note it, and say that it was trained."""
    channel = DealerChannel(place.address, "rank-0", place.keys.peer, place.keys.coordinator.public)
    client = CoordinatorClient(channel, "chaos", 1)
    step = 0
    while not isinstance(share := client.next_batch(step + 1, 0, timeout_s=300.0), str):
        assert share is not None
        batch, trajectories = share
        for trajectory in trajectories.values():
            note(trajectory)
        step = batch.step
        for engine in engines:
            engine.policy_version = step
        client.report_step(step, step, True, "", {})
    channel.close()


def _note(outcome: Outcome, trajectory: Trajectory) -> None:
    facts = trajectory.facts
    place = (facts.group, facts.sample_index)
    outcome.num_trained_twice += place in outcome.trained
    text = CharacterTokenizer().decode([int(token) for token in trajectory.tokens])
    outcome.trained[place] = (text, facts.reward, dict(facts.reward_parts))


async def _watch(timeline: Timeline, progress: Callable[[], tuple[int, int]]) -> None:
    while True:
        timeline.rows.append((time.monotonic(), *progress()))
        await asyncio.sleep(0.1)


def _read_books(path: Path, outcome: Outcome) -> None:
    with closing(sqlite3.connect(path)) as books:
        outcome.prompts = dict(books.execute("SELECT state, count(*) FROM prompts GROUP BY state").fetchall())
        outcome.dead_letters = [row[0] for row in books.execute("SELECT reason FROM prompts WHERE state = 'skipped'")]
