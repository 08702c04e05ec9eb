"""The processes of a rigged run: real coordinator, real rollout servers on a paced engine, a learner that counts.

Forked by `tests.chaos.rig.run`, each with a pipe to it. What Ray does in a cluster (start, call, restart) the rig does
here; sockets, ledger, checkpoints, leases and accounts are the product's own.
"""

import asyncio
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from learner.coordinator.process import CoordinatorProcess
from learner.disk.run_folder import CHECKPOINTS
from learner.models.read_back import WrittenFiles
from learner.models.roles import Roles
from learner.rank.checkpoint import CheckpointWriter, load_checkpoint
from learner.rank.coordinator_client import CoordinatorClient
from learner.rank.solo_work import SoloWork
from learner.run.start import RunStart, plan_restart, prepare_folder
from protocol.node.home import Keys
from protocol.settings.run_spec import EngineRequest
from protocol.settings.settings import Settings
from protocol.weights.controls import Attempt, learner_name
from protocol.weights.digest import digest_of_all
from protocol.wire.channel import DealerChannel
from rollout.neighbours.node import Node
from rollout.server import RolloutServer
from tests.fakes.engines import PacedEngine

STATE = "state.json"


@dataclass(frozen=True)
class Pace:
    """How fast things go. step_s: an optimizer step of the counting learner. seed: of the engines."""

    seed: int
    token_s: float = 0.0005
    mean_tokens: float = 60.0
    step_s: float = 0.01


def prepare(pipe: Connection, settings: Settings, start: RunStart, is_restart: bool) -> None:
    """Bring the run folder to where the next life starts, as the driver does."""
    if is_restart:
        start = plan_restart(start)
    prepare_folder(start, settings)
    pipe.send(("prepared", start))
    pipe.poll(None)


def run_coordinator(pipe: Connection, settings: Settings, start: RunStart) -> None:
    """Be the coordinator until told to close, or until its loop fails."""
    process = CoordinatorProcess(settings, start.folder, start.run_id, start.step, "127.0.0.1")
    pipe.send(("open", *process.open()))
    while True:
        if not pipe.poll(0.2):
            process.status()  # raises what ended the loop
            continue
        verb, *rest = pipe.recv()
        if verb == "lose":
            process.lose_server(*rest)
        elif verb == "stop":
            process.stop_after_step(*rest)
        elif verb == "status":
            pipe.send(("status", msgspec.to_builtins(process.status())))
        else:
            process.close()
            pipe.send(("closed",))
            return


def run_server(pipe: Connection, name: str, node: Node, pace: Pace) -> None:
    """Be a rollout server: attach, push and detach by command."""
    asyncio.run(_serve(pipe, name, node, pace))


async def _serve(pipe: Connection, name: str, node: Node, pace: Pace) -> None:
    async def start_engine(_: EngineRequest) -> PacedEngine:
        return PacedEngine(pace.seed ^ os.getpid(), pace.token_s, pace.mean_tokens)

    await obey(pipe, RolloutServer(name, ENGINE, start_engine, lambda: node))


async def obey(pipe: Connection, server: RolloutServer) -> None:
    """Start a server and do what the rig's end of the pipe says, until it is told to detach."""
    await server.start()
    loop = asyncio.get_running_loop()
    learner, numbers = "", itertools.count(1)
    while True:
        verb, *rest = await loop.run_in_executor(None, pipe.recv)
        if verb == "attach":
            await server.attach(rest[0])
            learner = learner_name(rest[0]["run_id"], rest[0]["incarnation"])
        elif verb == "push":
            await _push(server, (learner, next(numbers)), rest[0])
        elif verb == "stall":
            _burn(rest[0])
        elif verb == "detach":
            await server.stop()
            pipe.send(("detach",))
            return
        pipe.send((verb, rest[0]) if verb == "push" else (verb,))


async def _push(server: RolloutServer, attempt: Attempt, version: int) -> None:
    await server.prepare(attempt, {})
    await server.receive(attempt)
    await server.commit(attempt, version, "")
    await server.serve(attempt, version)


def _burn(seconds: float) -> None:
    """Keep this process's event loop from everything else, at full CPU."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def run_learner(
    pipe: Connection, settings: Settings, start: RunStart, where: tuple[str, int], keys: Keys, pace: Pace
) -> None:
    """Be the only learner rank: count what a step would train, save it in checkpoints, have every version pushed."""
    learner = CountingLearner(pipe, settings, start, where, keys)
    pipe.send(("ended", learner.train(pace.step_s)))


class _CountingPolicy:
    """In a policy's place: what is saved of it is `trained`, step -> group -> sample indices, of the lineage."""

    def __init__(self) -> None:
        self.trained: dict[str, dict[str, list[int]]] = {}

    def check_finite(self, with_optimizer: bool = False) -> None:
        """Nothing that could be NaN."""

    digest_form = "no tensors"

    def save_state(self, folder: Path) -> WrittenFiles:
        folder.mkdir(parents=True)
        (folder / STATE).write_text(json.dumps(self.trained))
        return {}

    def load_state(self, folder: Path) -> None:
        self.trained = json.loads((folder / STATE).read_text())

    def export_hf(self, folder: Path) -> WrittenFiles:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return {}

    def pushed_digest(self) -> str:
        return digest_of_all({})


class CountingLearner:
    """Rank 0 of one, without a model."""

    def __init__(
        self, pipe: Connection, settings: Settings, start: RunStart, where: tuple[str, int], keys: Keys
    ) -> None:
        address, incarnation = where
        self.pipe = pipe
        self._settings = settings
        self._start = start
        self._client = CoordinatorClient(
            DealerChannel(address, "rank-0", keys.peer, keys.coordinator.public), start.run_id, incarnation
        )
        self._policy: Any = _CountingPolicy()
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._checkpoints = CheckpointWriter(
            Roles(self._policy),
            self._client,
            SoloWork(store, 0, 60.0),
            start.folder,
            start.folder / "checkpoints",
            settings.learner.keep_checkpoints,
            settings.eval,
        )
        self.step = self.version = start.step
        if start.checkpoint is not None:
            load_checkpoint(Roles(self._policy), start.checkpoint)

    def train(self, step_s: float) -> str:
        self.push()
        while True:
            answer = self._client.next_batch(self.step + 1, 0, 120.0)
            if answer is None:
                self.push()
                continue
            if isinstance(answer, str):
                break
            batch, _ = answer
            self.set_absent(batch.absent)
            self._check_staleness([facts.oldest_version for facts in batch.facts])
            self._wait(step_s)
            self.step, self.version = batch.step, self.version + 1
            groups: dict[str, list[int]] = {}
            for facts in batch.facts:
                groups.setdefault(facts.group, []).append(facts.sample_index)
            self._policy.trained[str(self.step)] = groups
            self.push()
            self._client.report_step(self.step, self.version, True, "", {"policy/loss": 0.0})
            self.pipe.send(("step", self.step))
            if self.step % self._settings.learner.checkpoint_every_steps == 0:
                self._save()
        self._save()  # the last step again, mostly: the folder of that name has to give way
        return answer

    def _check_staleness(self, oldest: list[int]) -> None:
        staleness = self.version - min(oldest)
        assert staleness <= self._settings.learner.max_staleness, f"staleness {staleness} at step {self.step + 1}"
        assert max(oldest) <= self.version, f"version {max(oldest)} at version {self.version}"

    def _wait(self, step_s: float) -> None:
        """Take as long as a step, and longer when the rig says so."""
        time.sleep(step_s)
        while self.pipe.poll():
            verb, seconds = self.pipe.recv()
            assert verb == "stall"
            time.sleep(seconds)

    def set_absent(self, absent: Sequence[str]) -> None:
        """The rig itself knows which servers are there."""

    def push(self) -> None:
        """Have the rig bring every living server to this version."""
        self.pipe.send(("push", self.version))
        while (answer := self.pipe.recv())[0] != "pushed":
            time.sleep(answer[1])

    def _save(self) -> None:
        self._checkpoints.save(self.step, self.version)


ENGINE: dict[str, Any] = {
    "model": "none",
    "dtype": "float32",
    "tensor_parallel_size": 1,
    "seed": 0,
    "max_model_len": 4096,
    "trust_remote_code": False,
    "weights_backend": "gloo",
    "engine_args": {},
}


def final_state(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Return what the last checkpoint's learner had trained: step -> group -> sample indices."""
    path = folder / CHECKPOINTS / "latest" / "state" / "policy" / STATE
    state: dict[str, dict[str, list[int]]] = json.loads(path.read_text())
    return state
