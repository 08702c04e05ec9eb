"""A rollout server of real vLLM that loads weights wrongly when told to; turns are asked of it all the time.

    python -m tests.chaos.rig.lying_server NAME MODEL PORT NUM_WORKERS

It ends when its standard input does. NUM_WORKERS: tensor-parallel ones, of which the last one lies.
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.errors import NeighbourError
from protocol.settings.settings import Settings
from protocol.weights.controls import VERBS, Attempt
from tests.chaos.rig.control_line import HOST, serve_controls

_PROMPT = [20, 21, 14, 22, 23, 32] * 3
_WORKER = "tests.chaos.rig.loading_lies.LyingWorker"
# Of different lengths, so that some turn is always under way.
_TURN_TOKENS = (12, 24, 36, 48)
_TEMPTED_LIMIT_S = 10.0
_OLD_CACHE, PRETENDS = "old_cache", "commit_without_loading"
OWN_LIES = (_OLD_CACHE, PRETENDS)
"""Lies that are the server's, and not its workers'."""


class LyingServer:
    """What a `ControlLine` calls."""

    def __init__(self, name: str, engine: Any, server: Any) -> None:
        self._name, self._engine, self._server = name, engine, server
        self._lie: str | None = None
        self._written: Counter[int] = Counter()  # tokens by policy version, of turns that the engine ended
        self._finished: Counter[int] = Counter()  # of those that their conversations were given
        self._generate, engine.generate = engine.generate, self._counting_written

    def __getattr__(self, verb: str) -> Any:
        if verb not in VERBS:
            raise AttributeError(verb)
        return getattr(self._server, verb)

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        if self._lie != PRETENDS:
            return float(await self._server.commit(attempt, version, digest))
        self._server._gate.close(version)
        self._engine.policy_version, self._server._is_unserved = version, True
        return 0.0

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        """Answer late when lying: a turn that has tokens of the lie has ended in the engine by then."""
        if self._lie is not None and self._lie != PRETENDS:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TEMPTED_LIMIT_S):
                    while not self._written[self._engine.policy_version]:
                        await asyncio.sleep(0.005)
        logprobs: list[float] = await self._server.probe(attempt, tokens)
        return logprobs

    async def lie(self, name: str | None) -> None:
        """Load by this lie from now on; None: honestly."""
        self._lie = name
        self._engine.__dict__.pop("_cache_salt", None)
        if name == _OLD_CACHE:
            self._engine._cache_salt = lambda: "always the same"
        await self._engine._llm.collective_rpc("tell_lie", args=(None if name in OWN_LIES else name,))

    async def counted(self) -> dict[str, list[tuple[int, int]]]:
        """Return {"written", "finished"}: (policy version, tokens), of turns that ended in the engine, and for use."""
        return {"written": list(self._written.items()), "finished": list(self._finished.items())}

    async def ask_for_ever(self, settings: Settings) -> None:
        from rollout.episodes.conversation import Conversations

        talks = Conversations(self._engine, self._server._gate, settings.rollout, self._name)
        await asyncio.gather(*(self._ask(talks, number) for number in range(len(_TURN_TOKENS))))

    async def _ask(self, talks: Any, number: int) -> None:
        from rollout.environments.base import Task
        from rollout.episodes.conversation import SampleTask

        asked = 0
        while True:
            asked += 1
            sample = SampleTask(f"{self._name}-{number}", asked, 1, 1, "train", 7, Task("Q?", "A", {}))
            try:
                turn = await talks.begin(sample, _PROMPT).next_turn(max_tokens=_TURN_TOKENS[number])
            except NeighbourError:
                await asyncio.sleep(0.02)
                continue
            _count(self._finished, turn.version_spans)

    async def _counting_written(self, *arguments: Any) -> Any:
        generation = await self._generate(*arguments)
        _count(self._written, generation.version_spans)
        return generation


def settings_of(model: Path, num_workers: int) -> Settings:
    """Return the settings of the learner and of the servers' conversations."""
    return Settings.model_validate(
        {
            "policy": {"model": str(model), "dtype": "float32"},
            "rollout": {
                "tensor_parallel_size": num_workers,
                "max_context_tokens": 512,
                "max_response_tokens": max(_TURN_TOKENS),
                "turn_timeout_s": 60.0,
            },
            "weights": {"deadline_s": 20.0, "bucket_mb": 1},
        }
    )


def _count(tokens: Counter[int], spans: Sequence[tuple[int, int, int]]) -> None:
    for start, end, version in spans:
        tokens[version] += end - start


async def _serve(name: str, model: Path, port: int, num_workers: int) -> None:
    # Not above: vLLM's engine process imports this module too.
    from rollout.engine.engine import Engine
    from rollout.server import RolloutServer
    from tests.fakes.tiny_models import engine_of

    changes = {"tensor_parallel_size": num_workers, "engine_args": {"worker_extension_cls": _WORKER}}
    request = engine_of(model).model_copy(update=changes)
    engine = await Engine.start(request)

    async def start(_: object) -> Engine:
        return engine

    server = RolloutServer(name, request.model_dump(mode="json"), start)
    await server.start()
    lying = LyingServer(name, engine, server)
    await lying.lie(None)
    asking = asyncio.create_task(lying.ask_for_ever(settings_of(model, num_workers)))
    await serve_controls(lying, HOST, port)
    await asyncio.to_thread(sys.stdin.read)
    asking.cancel()
    engine.shutdown()
    os._exit(0)  # connections that the learner left open would each say so


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
