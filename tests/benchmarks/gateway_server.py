"""The servers of `tests.benchmarks.gateway`: ours on a scripted engine, or the plain one that a user would write.

    python -m tests.benchmarks.gateway_server ours|plain NUM_AGENTS

Prints its address. When its input ends it prints, as JSON, the lag of its event loops (each asked to wake every 10 ms)
in milliseconds, how many turns it made, and its processor time.
"""

import asyncio
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from protocol.http.listen import address_of, bind
from rollout.endpoint.player import AgentPlayer
from rollout.engine.generation import Generation, Sampling
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import Task
from rollout.episodes.sample import SampleTask
from rollout.neighbours.reward_client import NoRewards
from tests.benchmarks.load import percentile
from tests.fakes.engines import TokenizingEngine
from tests.fakes.rollout_fakes import make_spec
from tests.fakes.tool_models import FAMILIES

TOKEN = "the-token-of-this-benchmark"
_TICK_S = 0.01
_TURN_S = (0.1, 0.5)


class Lag:
    """How late an event loop is."""

    def __init__(self) -> None:
        self.late_s: list[float] = []

    async def watch(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self.late_s.append(time.perf_counter() - asked - _TICK_S)

    def told(self) -> dict[str, float]:
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {name: 1e3 * percentile(self.late_s, share) for name, share in shares.items()}


class SlowEngine(TokenizingEngine):
    """Writes "ok" after a while."""

    def __init__(self) -> None:
        super().__init__(lambda context: "ok<|im_end|>", FAMILIES["hermes"].tokenizer())
        self.num_turns = 0

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        self.num_turns += 1
        await asyncio.sleep(random.uniform(*_TURN_S))
        tokens = self.tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
        spans = ((0, len(tokens), 0),)
        return Generation(tokens, [-0.5] * len(tokens), spans, "stop", None, "ok<|im_end|>")


async def ours(num_agents: int) -> None:
    engine, gate = SlowEngine(), VersionGate()
    gate.open()
    spec = make_spec(max_context_tokens=1 << 20, max_response_tokens=64, environment="agents")
    player = await AgentPlayer.open(engine, gate, None, NoRewards(), spec, "s0", TOKEN)
    samples = [
        asyncio.create_task(player.play(SampleTask(f"g{i}", 0, 1, 1, "train", 7, Task("", None, {}))))
        for i in range(num_agents)
    ]
    lag = Lag()
    watching = asyncio.create_task(lag.watch())
    print(player.base_url.removesuffix("/v1"), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    watching.cancel()
    done, _ = await asyncio.wait(samples, timeout=10.0)
    finished = sum(not sample.cancelled() and sample.exception() is None for sample in done)
    _tell({"http": lag.told(), "turns": engine.num_turns, "finished": finished})


async def plain(num_agents: int) -> None:
    """What a user would write: one event loop, and the whole history tokenised for each turn."""
    tokenizer, numbers, lag = FAMILIES["hermes"].tokenizer(), itertools.count(), Lag()
    app = FastAPI()

    @app.post("/sluice/sessions")
    async def sessions() -> dict[str, Any]:
        number = next(numbers)
        return {"id": str(number), "api_key": str(number), "idle_timeout_s": 600.0}

    turns = itertools.count(1)
    last = {"turns": 0, "finished": 0}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        body = await request.json()
        last["turns"] = next(turns)
        tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        await asyncio.sleep(random.uniform(*_TURN_S))
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}

    @app.post("/sluice/sessions/{name}/reward")
    async def reward(name: str) -> dict[str, Any]:
        last["finished"] += 1
        return {"counted": True}

    listener = bind("plain", "127.0.0.1", 0)
    listener.listen(4096)
    server = uvicorn.Server(uvicorn.Config(app, http="h11", log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(lag.watch())
    print(address_of(listener), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    watching.cancel()
    _tell({"http": lag.told(), "turns": last["turns"], "finished": last["finished"]})
    server.should_exit = True
    await serving


def _tell(told: dict[str, Any]) -> None:
    print(json.dumps({**told, "cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    # As a rollout server does once it has started.
    gc.collect()
    gc.freeze()
    asyncio.run({"ours": ours, "plain": plain}[sys.argv[1]](int(sys.argv[2])))
