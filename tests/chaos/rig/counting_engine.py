"""An engine with a counter of its own that survives it, and conversations of several turns of which some fail.

What a rigged run's servers are made of for `tests.chaos.token_books`.
"""

import asyncio
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from protocol.errors import NeighbourError
from protocol.settings.run_spec import EngineRequest
from rollout.environments.base import Resources, Step, Task, Turn
from rollout.neighbours.node import Node
from rollout.server import RolloutServer
from tests.chaos.rig.part import Part
from tests.chaos.rig.processes import ENGINE, Pace, obey
from tests.fakes.engines import PacedEngine

COUNTERS = "engine_counters"
_MAX_TURNS = 4
_FAILING = 0.03  # share of turns after which the environment fails


class ShortTalk:
    """One to four turns; each may be the one after which the environment fails."""

    stop: tuple[str, ...] = ()

    def __init__(self, resources: Resources) -> None:
        self._turn = 0
        self._last = random.randint(1, _MAX_TURNS)

    async def reset(self, task: Task) -> str:
        return str(task.prompt)

    def snapshot(self) -> list[Any]:
        return [self._turn, self._last]

    async def resume(self, snapshot: list[Any]) -> None:
        self._turn, self._last = snapshot

    async def step(self, turn: Turn) -> Step:
        self._turn += 1
        if random.random() < _FAILING:
            raise NeighbourError("environment", "was told to fail")
        return Step(" more:", is_done=self._turn >= self._last, finish="answer" if self._turn >= self._last else None)


class CountingEngine(PacedEngine):
    """Counts its tokens in a file, which has two words: whether it is just counting, and the count."""

    def __init__(self, pace: Pace, counter: Path) -> None:
        super().__init__(pace.seed ^ os.getpid(), pace.token_s, pace.mean_tokens)
        counter.parent.mkdir(exist_ok=True)
        counter.write_bytes(bytes(16))
        with counter.open("r+b") as file:
            self._own = memoryview(mmap.mmap(file.fileno(), 16)).cast("Q")

    @property
    def on_tokens(self) -> Callable[[str, int], None]:  # type: ignore[override]
        """What is told of new tokens: first the engine's own counter, then what the server has set here."""
        return self._count

    @on_tokens.setter
    def on_tokens(self, told: Callable[[str, int], None]) -> None:
        self._told = told

    def _count(self, request_id: str, num_tokens: int) -> None:
        self._own[0] = 1
        self._own[1] += num_tokens
        self._told(request_id, num_tokens)
        self._own[0] = 0


def counters_folder() -> Path:
    return Path(os.environ["SLUICE_HOME"]) / COUNTERS


def num_counted() -> int:
    """Return the tokens that all engines counted, those of killed processes too."""
    files = counters_folder().iterdir()
    return sum(int.from_bytes(file.read_bytes()[8:], "little") for file in files)


def run_counting_server(pipe: Connection, name: str, node: Node, pace: Pace) -> None:
    """Be a rollout server whose engine counts for itself."""
    random.seed(pace.seed ^ os.getpid())
    counter = counters_folder() / f"{name}-{os.getpid()}-{time.monotonic_ns()}"

    async def start_engine(_: EngineRequest) -> CountingEngine:
        return CountingEngine(pace, counter)

    asyncio.run(obey(pipe, RolloutServer(name, ENGINE, start_engine, lambda: node)))


def kill_between_counts(part: Part) -> bool:
    """Kill a server at any moment but the microsecond between the engine's own count and the count that it tells.

    Returns False when it was in that microsecond: kill it later; or when an earlier kill has just ended it.
    """
    process = psutil.Process(part.process.pid)
    process.send_signal(signal.SIGSTOP)
    while (status := process.status()) != psutil.STATUS_STOPPED:
        if status == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.001)
    files = list(counters_folder().glob(f"{part.name}-{part.process.pid}-*"))
    if any(file.read_bytes()[0] for file in files):
        process.send_signal(signal.SIGCONT)
        return False
    process.kill()
    return True
