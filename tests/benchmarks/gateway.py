"""A thousand live agents with long histories at one server's OpenAI-compatible address, beside a plain gateway.

    python -m tests.benchmarks.gateway [--seed N] [--short]

Each agent's history is 1k to 100k tokens long (a token is a byte here), and sent whole with each of its three turns;
the engine is scripted and takes 0.1 to 0.5 s for a turn. Agents begin within 30 s. One request in ten is given up by
its client and sent again with its Idempotency-Key. The plain gateway (`tests.benchmarks.gateway_server`) does what a
user would write in FastAPI: everything in one event loop, each history tokenised anew. Both are processes of their own,
one after the other.

holds: our event loops are late by at most 50 ms in 99 % of the wakings, every request is answered (unanswered=0), and
none is generated twice (duplicates=0). --short: 100 agents, who begin within 3 s.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.benchmarks.gateway_server import TOKEN
from tests.benchmarks.load import percentile
from tests.chaos.rig.verdict import conclude, options

_TURNS = 3
_PAUSE_S = (0.5, 3.0)
_LONGEST_LAG_MS = 50.0
_ANSWER_S = 60.0
_BEGIN_EACH_S = 0.03


@dataclass
class Met:
    """What the agents met."""

    seconds: list[float] = field(default_factory=list)  # of each turn
    unanswered: int = 0  # requests without a 200
    took_s: float = 0.0  # all of it


class Agent:
    """One agent over plain sockets: httpx would take more processor time than the server."""

    def __init__(self, address: str, draw: random.Random, met: Met, begins_in_s: float) -> None:
        self._where = urlsplit(address)
        self._draw = draw
        self._met = met
        self._begins_in_s = begins_in_s

    async def play(self) -> None:
        await asyncio.sleep(self._begins_in_s)
        status, told = await self._post("/sluice/sessions", TOKEN, b'{"wait_s": 60}')
        if status != 200:
            self._met.unanswered += 1
            return
        key = told["api_key"]
        words = "some words of a long history " * 4000
        history: list[dict[str, str]] = [{"role": "user", "content": words[: int(10 ** self._draw.uniform(3, 5))]}]
        for number in range(_TURNS):
            body = json.dumps({"model": "policy", "messages": history}).encode()
            started = time.perf_counter()
            if self._draw.random() < 0.1:
                await self._give_up(key, body, f"turn-{number}")
            status, _ = await self._post("/v1/chat/completions", key, body, f"turn-{number}")
            self._met.seconds.append(time.perf_counter() - started)
            self._met.unanswered += status != 200
            history += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "and now?"}]
            await asyncio.sleep(self._draw.uniform(*_PAUSE_S))
        status, _ = await self._post(f"/sluice/sessions/{told['id']}/reward", key, b'{"reward": 1.0}')
        self._met.unanswered += status != 200

    async def _post(self, path: str, key: str, body: bytes, idempotency: str = "") -> tuple[int, Any]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(self._where.hostname, self._where.port)
                writer.write(self._head(path, key, body, idempotency) + body)
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                answer = await reader.readexactly(length)
                writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return 0, {}
        return int(head.split()[1]), json.loads(answer)

    async def _give_up(self, key: str, body: bytes, idempotency: str) -> None:
        _, writer = await asyncio.open_connection(self._where.hostname, self._where.port)
        writer.write(self._head("/v1/chat/completions", key, body, idempotency) + body)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    def _head(self, path: str, key: str, body: bytes, idempotency: str) -> bytes:
        lines = [f"POST {path} HTTP/1.1", f"host: {self._where.netloc}", f"authorization: Bearer {key}"]
        lines += [f"idempotency-key: {idempotency}"] if idempotency else []
        lines += ["content-type: application/json", "connection: close", f"content-length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode()


def main() -> int:
    arguments = options(__doc__ or "")
    num_agents = 100 if arguments.short else 1000
    figures: dict[str, Any] = {}
    for kind in ("plain", "ours"):
        met, told = measured(kind, num_agents, arguments.seed)
        duplicates = told["turns"] - num_agents * _TURNS
        lags = {name: told[name]["p99"] for name in ("http", "engine") if name in told}
        print(
            f"{kind}: {len(met.seconds)} turns in {met.took_s:.1f} s, a turn {percentile(met.seconds, 0.5):.2f} s "
            f"(p99 {percentile(met.seconds, 0.99):.2f}), lag p99 {lags} ms, {duplicates} turns twice, "
            f"{met.unanswered} unanswered, {told['finished']} samples",
            flush=True,
        )
        prefix = "" if kind == "ours" else "plain_"
        figures |= {f"{prefix}{name}_lag_p99_ms": lag for name, lag in lags.items()}
        figures |= {f"{prefix}duplicates": duplicates, f"{prefix}unanswered": met.unanswered}
    is_on_time = max(figures["http_lag_p99_ms"], figures["engine_lag_p99_ms"]) <= _LONGEST_LAG_MS
    holds = is_on_time and not figures["duplicates"] and not figures["unanswered"]
    return conclude("gateway", holds, agents=num_agents, **figures)


def measured(kind: str, num_agents: int, seed: int) -> tuple[Met, dict[str, Any]]:
    """Return what agents met at a server of this kind, and what it says of itself."""
    command = [sys.executable, "-m", "tests.benchmarks.gateway_server", kind, str(num_agents)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        met = asyncio.run(_play_all(server.stdout.readline().strip(), num_agents, seed))
        said, _ = server.communicate(timeout=60.0)
    return met, json.loads(said.splitlines()[-1])


async def _play_all(address: str, num_agents: int, seed: int) -> Met:
    met = Met()
    started = time.perf_counter()
    agents = [
        Agent(address, random.Random(f"{seed}/{number}"), met, _BEGIN_EACH_S * number) for number in range(num_agents)
    ]
    await asyncio.gather(*(agent.play() for agent in agents))
    met.took_s = time.perf_counter() - started
    return met


if __name__ == "__main__":
    sys.exit(main())
