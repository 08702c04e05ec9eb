"""Rollout servers on real vLLM that load weights wrongly when told to, a learner, and turns asked for all the time."""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from transformers import Qwen2ForCausalLM

from learner.models.policy import PolicyEngine
from learner.rank.push import RankPusher
from learner.weights.push import PushReport
from protocol.errors import NeighbourError
from protocol.settings.run_spec import EngineRequest
from protocol.settings.settings import Settings
from protocol.weights.controls import VERBS
from rollout.engine.engine import Engine
from rollout.environments.base import Task
from rollout.episodes.conversation import Conversations
from rollout.episodes.sample import SampleTask
from rollout.server import RolloutServer
from tests.chaos.rig.plain_policy import PlainPolicy
from tests.fakes.tiny_models import engine_of

T = TypeVar("T")
_PROMPT = [20, 21, 14, 22, 23, 32] * 3
_WORKER = "tests.chaos.rig.loading_lies.LyingWorker"
_JOINED_LIMIT_S = 60.0


class LyingServer:
    """A rollout server in this process's event loop, called from the pusher's. pretends: commits without loading."""

    def __init__(self, name: str, engine: Engine, server: RolloutServer) -> None:
        self.name = name
        self.engine = engine
        self.server = server
        self.pretends = False
        self._loop = asyncio.get_running_loop()

    async def lie(self, name: str | None) -> None:
        """Load by this lie from now on; None: honestly."""
        await self.engine._llm.collective_rpc("tell_lie", args=(name,))

    def __getattr__(self, verb: str) -> Any:
        if verb not in VERBS:
            raise AttributeError(verb)

        async def call(*arguments: Any) -> Any:
            does_nothing = verb == "commit" and self.pretends
            there = self._pretend(*arguments) if does_nothing else getattr(self.server, verb)(*arguments)
            return await self._there(there)

        return call

    async def _pretend(self, version: int, digest: str) -> float:
        """Say that the version is committed, and load nothing."""
        self.server._gate.close()
        self.engine.policy_version, self.server._is_unserved = version, True
        return 0.0

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))


@dataclass
class LyingPair:
    """The learner and its servers. written: how many tokens of finished turns carry (server, version)."""

    policy: PlainPolicy
    servers: list[LyingServer]
    pusher: RankPusher
    version: int = 0
    written: Counter[tuple[str, int]] = field(default_factory=Counter)
    push_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})  # looked after, or not
    asking: list[asyncio.Task[None]] = field(default_factory=list)

    async def push(self, step: float, by: int = 1, *, is_looked_after: bool = True) -> PushReport:
        """Move the weights and push them as the version that is `by` further, to servers that have all joined.

        is_looked_after: False has servers serve what they say that they have, as `weights.probe: false` does.
        """
        await self._joined()
        self.policy.step(step)
        self.version += by
        tokens, self.pusher._probe.tokens = self.pusher._probe.tokens, []
        if is_looked_after:
            self.pusher._probe.tokens = tokens
        begun = time.perf_counter()
        report = await asyncio.to_thread(self.pusher.push, self.version)
        self.push_s[is_looked_after].append(time.perf_counter() - begun)
        self.pusher._probe.tokens = tokens
        assert report is not None
        return report

    def ask_for_ever(self, num_each: int) -> None:
        for server in self.servers:
            self.asking += [asyncio.create_task(self._ask(server, number)) for number in range(num_each)]

    async def close(self) -> None:
        for task in self.asking:
            task.cancel()
        await asyncio.gather(*self.asking, return_exceptions=True)
        await asyncio.to_thread(self.pusher.close)
        for server in self.servers:
            await server.server.stop()

    async def _ask(self, server: LyingServer, number: int) -> None:
        settings = Settings.model_validate(_settings(Path("."), 1)).rollout
        talks = Conversations(server.engine, server.server._gate, settings, server.name)
        asked = 0
        while True:
            asked += 1
            sample = SampleTask(f"{server.name}-{number}", asked, 1, 1, "train", 7, Task("Q?", "A", {}))
            try:
                turn = await talks.begin(sample, _PROMPT).next_turn()
            except NeighbourError:
                await asyncio.sleep(0.02)
                continue
            for start, end, version in turn.version_spans:
                self.written[server.name, version] += end - start

    async def _joined(self) -> None:
        """Wait until servers that failed have joined again, as training does without noticing."""
        assert self.pusher._pusher is not None
        end = time.monotonic() + _JOINED_LIMIT_S
        while any(link.failure is not None for link in self.pusher._pusher._links) and time.monotonic() < end:
            self.pusher._pusher._loop.call_soon_threadsafe(self.pusher._pusher._rejoin_failed)
            await asyncio.sleep(0.05)


async def start_pair(folder: Path, num_servers: int, num_workers: int) -> LyingPair:
    """Return servers of so many tensor-parallel workers each, and their learner; nothing is pushed yet."""
    request = engine_of(folder).model_copy(
        update={"tensor_parallel_size": num_workers, "engine_args": {"worker_extension_cls": _WORKER}}
    )
    engines = [await Engine.start(request) for _ in range(num_servers)]
    servers = [await _server(f"server-{number}", engine, request) for number, engine in enumerate(engines)]
    for server in servers:
        await server.lie(None)
    policy = PlainPolicy(Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32))
    settings = Settings.model_validate(_settings(folder, num_workers))
    pusher = RankPusher(cast(PolicyEngine, policy), settings, servers, "127.0.0.1", "gloo")
    return LyingPair(policy, servers, pusher)


async def _server(name: str, engine: Engine, request: EngineRequest) -> LyingServer:
    async def start(_: EngineRequest) -> Engine:
        return engine

    server = RolloutServer(name, request.model_dump(mode="json"), start)
    await server.start()
    return LyingServer(name, engine, server)


def _settings(folder: Path, num_workers: int) -> dict[str, dict[str, Any]]:
    return {
        "policy": {"model": str(folder), "dtype": "float32"},
        "rollout": {
            "tensor_parallel_size": num_workers,
            "max_context_tokens": 512,
            "max_response_tokens": 48,
            "turn_timeout_s": 60.0,
        },
        "weights": {"deadline_s": 20.0, "bucket_mb": 1},
    }
