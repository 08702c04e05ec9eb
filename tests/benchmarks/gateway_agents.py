"""The agents of `tests.benchmarks.gateway`, in a process of their own with a lower priority than the server's.

    python -m tests.benchmarks.gateway_agents ADDRESS NUM_AGENTS SEED LIMIT_S

Prints as JSON what they met. Whoever is still at it after LIMIT_S is stopped.
"""

import asyncio
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.benchmarks.gateway_server import TOKEN

TURNS = 3
_NICENESS = 5
_PAUSE_S = (0.5, 3.0)
_ANSWER_S = 60.0
_BEGIN_EACH_S = 0.03


@dataclass
class Met:
    """What the agents met."""

    seconds: list[float] = field(default_factory=list)  # of each turn
    unanswered: int = 0  # requests without a 200
    took_s: float = 0.0  # all of it
    is_stopped: bool = False  # True: agents were still at it when the time was up


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
        for number in range(TURNS):
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


async def _play_all(address: str, num_agents: int, seed: int, limit_s: float) -> Met:
    met = Met()
    started = time.perf_counter()
    agents = [
        Agent(address, random.Random(f"{seed}/{number}"), met, _BEGIN_EACH_S * number) for number in range(num_agents)
    ]
    playing = [asyncio.create_task(agent.play()) for agent in agents]
    done, late = await asyncio.wait(playing, timeout=limit_s)
    met.took_s, met.is_stopped = time.perf_counter() - started, bool(late)
    for agent in late:
        agent.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    await asyncio.gather(*done)
    return met


def main() -> None:
    address, num_agents, seed, limit_s = sys.argv[1:]
    os.nice(_NICENESS)
    met = asyncio.run(_play_all(address, int(num_agents), int(seed), float(limit_s)))
    print(json.dumps({**asdict(met), "cpu_s": time.process_time()}))


if __name__ == "__main__":
    main()
