"""A rollout server of real vLLM whose weight verbs come over TCP, and which a fault strikes in a state of a push.

    python -m tests.chaos.rig.vllm_server NAME MODEL HOST PORT WAY [FAULT]

It ends when its standard input does. WAY: one of `WAYS`. FAULT: `server_nursery.Fault` as JSON, which strikes from the
first call on.
"""

import asyncio
import itertools
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocol.settings.settings import Settings
from tests.chaos.rig.control_line import serve_controls
from tests.chaos.rig.server_nursery import DisturbedServer, Fault

WAYS = ("second_copy", "in_place")
"""Ways to receive a push: into a second copy beside generation, or into the weights in use during a pause."""
PROMPT = [20, 21, 14, 22, 23, 32] * 3
_MAX_TOKENS = 64


class Turns:
    """Asks for turns as a run's conversations do: the gate holds them back while weights change."""

    def __init__(self, name: str, engine: Any, server: Any) -> None:
        from rollout.episodes.conversation import Conversations

        given = {"max_context_tokens": 512, "max_response_tokens": _MAX_TOKENS, "turn_timeout_s": 60.0}
        settings = Settings.model_validate({"rollout": given}).rollout
        self._name = name
        self._talks = Conversations(engine, server._gate, settings, name)
        self._numbers = itertools.count(1)

    async def write(self, num_tokens: int) -> dict[str, Any]:
        """Return a turn's `tokens`, their `logprobs`, and the `spans` of policy versions that wrote them."""
        from rollout.environments.base import Task
        from rollout.episodes.sample import SampleTask

        sample = SampleTask(self._name, next(self._numbers), 1, 1, "train", 7, Task("Q?", "A", {}))
        turn = await self._talks.begin(sample, PROMPT).next_turn(max_tokens=num_tokens)
        return {"tokens": list(turn.tokens), "logprobs": list(turn.logprobs), "spans": list(turn.version_spans)}


async def _serve(name: str, model: Path, host: str, port: int, way: str, fault: Fault | None) -> None:
    # Not above: vLLM's engine process imports this module too.
    from rollout.engine.engine import Engine
    from rollout.server import RolloutServer
    from tests.fakes.tiny_models import engine_of

    request = engine_of(model, second_copy=way != "in_place")
    engine = await Engine.start(request)

    async def start(_: object) -> Engine:
        return engine

    server = RolloutServer(name, request.model_dump(mode="json"), start)
    await server.start()
    pids = {"server": os.getpid(), "engine": engine._processes[0].pid}
    await serve_controls(DisturbedServer(server, Turns(name, engine, server).write, fault, pids), host, port)
    await asyncio.to_thread(sys.stdin.read)
    engine.shutdown()
    os._exit(0)  # connections that the learner left open would each say so


def arguments_of(name: str, model: Path, host: str, port: int, way: str, fault: Fault | None) -> list[str]:
    """Return the command that starts one."""
    told = [json.dumps(asdict(fault))] if fault is not None else []
    return [sys.executable, "-m", "tests.chaos.rig.vllm_server", name, str(model), host, str(port), way, *told]


if __name__ == "__main__":
    name, model, host, port, way, *rest = sys.argv[1:]
    told = json.loads(rest[0]) if rest else None
    struck_by = Fault(**{**told, "cut": tuple(told["cut"])}) if told is not None else None
    asyncio.run(_serve(name, Path(model), host, int(port), way, struck_by))
