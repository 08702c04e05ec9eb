"""Runs of the recipe files, two steps each; run by test_recipe_files in a process of its own.

python recipe_run.py FOLDER NAME [NAME ..]     FOLDER/model is the policy; writes FOLDER/found.json

All is the product's but vLLM, Ray and the services: coordinator, ledger, rollout server, session, environment, HTTP
clients, a DeepSpeed rank with every model that the recipe asks for, pushes over gloo, checkpoint and audit. In vLLM's
place stands an engine whose logprobs are those of the pushed weights. What a recipe says of its algorithm stays; what
it says of its machines, its sizes and its learning rate becomes small.
"""

import asyncio
import contextlib
import json
import random
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from learner.audit import main as audit
from learner.coordinator.process import CoordinatorProcess
from learner.rank.process import RankPlace, RunPlace
from learner.rank.rank import train
from learner.rank.start import World, join, load
from learner.run.start import RunStart, prepare_folder
from protocol.node.home import Keys
from protocol.settings.loader import load_settings
from protocol.settings.run_spec import EngineRequest, RunSpec, engine_request, run_spec
from protocol.settings.settings import Settings
from protocol.weights.controls import FIRST_TURN, learner_name
from rollout.neighbours.node import Node
from rollout.server import RolloutServer
from tests.chaos.rig.settings import rig_home
from tests.fakes.http_servers import Answer, Received, ScriptedServer, scripted_server
from tests.fakes.in_process_server import InProcessServer
from tests.fakes.ports import free_port
from tests.learner.run.pushed_engine import ModelEngine

SHELF = Path(__file__).resolve().parents[3] / "deploy" / "configs" / "recipes"
HOST, SERVER = "127.0.0.1", "sluice-rollout-0"
# Recipe -> its staleness: their rank and server take turns on a device, and pushes stay within the machine.
SHARED = {"search_ppo": 1, "gsm8k_grpo": 0}


def small(name: str, folder: Path) -> Settings:
    """Return the recipe's settings for two steps on a CPU."""
    found = load_settings(SHELF / f"{name}.yaml", [])
    changed = {
        "run.dir": folder / "runs",
        "run.max_steps": 2,
        "policy.model": folder / "model",
        "data.train": folder / "rows.jsonl",
        "data.eval": folder / "rows.jsonl",
        "rollout.num_servers": 1,
        "rollout.tensor_parallel_size": 1,
        "rollout.group_size": min(4, found.rollout.group_size),
        "rollout.max_response_tokens": 24,
        "rollout.max_observation_tokens": 32,
        "rollout.max_context_tokens": 256,
        "rewards.overlong_buffer_tokens": min(8, found.rewards.overlong_buffer_tokens),
        "learner.num_ranks": 1,
        "learner.groups_per_step": max(8, found.learner.num_mini_batches),
        "learner.micro_batch_tokens": 512,
        "learner.lr": 1e-3,
        "learner.checkpoint_every_steps": 0,
        "eval.every_steps": 2,
        "eval.num_prompts": 2,
        "eval.samples": min(2, found.eval.samples),
    }
    if name in SHARED:
        changed["learner.max_staleness"] = SHARED[name]
    options = [part for key, value in changed.items() for part in (f"--{key}", str(value))]
    return load_settings(SHELF / f"{name}.yaml", options)


def write_turn(turn: int, number: int) -> str:
    """Return a search, words without an end or, after the first turn, an answer."""
    draw = random.Random(number)
    word = "".join(draw.choice("abcdefgh") for _ in range(draw.randint(1, 30)))
    texts = [f"<search>{word}</search>", word + "<eos>", f"<answer>{word}</answer>"]
    return draw.choice(texts[: 3 if turn else 2])


def reward_of(asked: Received) -> Answer:
    """Return 1 or 0, by the text alone."""
    return Answer({"rewards": [float(zlib.crc32(query.encode()) % 2) for query in asked.body["query"]]})


def passages_of(asked: Received) -> Answer:
    passage = {"document": {"id": "1", "contents": '"A title"\nsome words'}, "score": 1.0}
    return Answer({"result": [[passage] * asked.body["topk"] for _ in asked.body["queries"]]})


class Serving:
    """A rollout server in a thread of its own, attached to a run."""

    def __init__(self, settings: Settings, services: ScriptedServer, keys: Keys) -> None:
        node = Node(
            services.script_by("reward", reward_of), services.script_by("retrieve", passages_of), "token" * 4, keys
        )
        model = Path(settings.policy.model)
        self.engine = ModelEngine(model, getattr(torch, settings.policy.dtype), write_turn)

        async def start_engine(_: EngineRequest) -> Any:
            return self.engine

        self._request = request = engine_request(settings, model, "gloo")
        self._server = RolloutServer(SERVER, request.without_files().model_dump(), start_engine, lambda: node)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def attach(self, spec: dict[str, Any]) -> InProcessServer:
        """Serve a run; returns the weight controls that its learner is given."""

        async def begin() -> InProcessServer:
            await self._server.start(self._request.files)
            await self._server.attach(spec)
            return InProcessServer(SERVER, self._server)

        return asyncio.run_coroutine_threadsafe(begin(), self._loop).result(120.0)

    def sleep(self, spec: RunSpec) -> None:
        """Sleep before the rank loads its models, as a run's command has it."""
        turn = self._server.sleep((learner_name(spec.run_id, spec.incarnation), FIRST_TURN))
        asyncio.run_coroutine_threadsafe(turn, self._loop).result(120.0)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(120.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60.0)


def run_recipe(
    settings: Settings, world: World, services: ScriptedServer, keys: Keys, *, is_shared: bool
) -> dict[str, Any]:
    """Return what two steps of a recipe left: metrics lines, checksums of the pushed weights, the audit's status."""
    start, model = RunStart(Path(settings.run.dir) / settings.run.name, None), Path(settings.policy.model)
    prepare_folder(start, settings)
    serving = Serving(settings, services, keys)
    with coordinator_of(settings, start) as (address, incarnation), contextlib.closing(serving):
        spec = run_spec(settings, start.run_id, incarnation, address)
        controls = serving.attach(spec.model_dump(mode="json"))
        if is_shared:
            serving.sleep(spec)
        backend = "ipc" if is_shared else "gloo"
        place = RunPlace(start.run_id, incarnation, address, (SERVER,), backend, shares_devices=is_shared)
        models = load(settings, {"policy.model": model}, None, lambda phase: None)
        by_name, names, tell = lambda _: controls, lambda: place.servers, lambda _: None
        ended = train(world, models, settings, start.folder, model, place, by_name, names, tell)
    lines = [json.loads(line) for line in (start.folder / "metrics.jsonl").read_text().splitlines()]
    engine = serving.engine
    left = {"pushed": engine.pushed, "sleeps": engine.num_sleeps, "audit": audit([str(start.folder)])}
    return {"ended": ended, "metrics": lines, **left}


@contextlib.contextmanager
def coordinator_of(settings: Settings, start: RunStart) -> Iterator[tuple[str, int]]:
    coordinator = CoordinatorProcess(settings, start.folder, start.run_id, 0, HOST)
    try:
        yield coordinator.open()
    finally:
        coordinator.close()


def main(folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    rows = [{"prompt": f"question {number}", "label": "1"} for number in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    world = join(RankPlace(0, 1, HOST, free_port()), 60.0, None)
    with rig_home(folder) as keys, scripted_server() as services:
        found = {
            name: run_recipe(small(name, folder), world, services, keys, is_shared=name in SHARED) for name in names
        }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
