"""A reward service and retriever that misbehaves on a seeded schedule: `python -m tests.chaos.rig.bad_http`.

Of the requests to /score and /retrieve 30 % are answered 5xx, 10 % not at all, and 5 % with something that is no
answer; which one a request meets follows from --seed and its number. Otherwise the answer is right: rewards and
passages are functions of what was asked (`reward_of`, `passages_of`), so that a misassigned or invented one is seen.
Nothing listens during an outage. `BadServer` starts one and speaks to it; used by the chaos commands of rewards and
retrievers.
"""

import argparse
import asyncio
import gzip
import json
import random
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

MARKER = "THE-SERVICE-IS-BROKEN"
"""In every answer that is none: it must never be found in a trajectory."""

_SHARES = (("5xx", 0.30), ("hang", 0.10), ("nonsense", 0.05))
_NONSENSE = (
    "bytes",
    "nan",
    "infinity",
    "short",
    "wrong_shape",
    "error_page",
    "huge",
    "endless",
    "drip",
    "gzip_bomb",
    "redirect",
    "cut_off",
)


def reward_of(query: str) -> float:
    """Return the one right reward of a query, in [0, 1)."""
    return zlib.crc32(query.encode()) / 2**32


def passages_of(query: str, topk: int = 2) -> list[str]:
    """Return the contents of the right passages for a query."""
    return [f'"About {query}"\nfact {i}: {zlib.crc32(f"{query}/{i}".encode())}' for i in range(topk)]


class BadServer:
    """One such server as a process of its own."""

    def __init__(self, address: str) -> None:
        self.address = address

    def outage(self, seconds: float) -> None:
        """Have it close its port for a while, from now on."""
        self._ask("/outage", {"seconds": seconds})

    def counts(self) -> Counter[str]:
        """Return how many requests met what: a fault by name, or "right"."""
        return Counter(self._ask("/counts", {}))

    def _ask(self, path: str, body: Any) -> Any:
        return httpx.post(self.address + path, json=body, timeout=10.0, trust_env=False).json()


@contextmanager
def bad_server(seed: int) -> Iterator[BadServer]:
    """Yield a server that runs until the block ends."""
    command = [sys.executable, "-m", "tests.chaos.rig.bad_http", "--seed", str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield BadServer(process.stdout.readline().strip())
        finally:
            process.kill()


# -- the process ------------------------------------------------------------------------------------------------------


class _Service:
    """Speaks just enough HTTP/1.1 to break it at will."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._counts: Counter[str] = Counter()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _be_away(self, seconds: float) -> None:
        await asyncio.sleep(0.05)  # until the answer to whoever asked for it is out
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(seconds)
        await self.open()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone, or an outage began
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False when its connection is of no use any more."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ", 2)[1]
        length = next(int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        if path == "/outage":
            task = asyncio.create_task(self._be_away(body["seconds"]))
            self._background.add(task)
        if path in ("/outage", "/counts"):
            return await _send(writer, 200, json.dumps(self._counts).encode())
        fault = self._draw()
        self._counts[fault] += 1
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "right":
            return await _send(writer, 200, json.dumps(_right(path, body)).encode())
        if fault.isdigit():
            headers = {"retry-after": "0.1"} if self._random.random() < 0.2 else {}
            return await _send(writer, int(fault), f"{MARKER}: overloaded".encode(), headers)
        return await _send_nonsense(writer, fault, path, body)

    def _draw(self) -> str:
        """Return what the next request meets."""
        drawn = self._random.random()
        for fault, share in _SHARES:
            drawn -= share
            if drawn < 0:
                if fault == "5xx":
                    return self._random.choice(["500", "502", "503", "504"])
                return self._random.choice(_NONSENSE) if fault == "nonsense" else fault
        return "right"


def _right(path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path.endswith("/retrieve"):
        found = [passages_of(query, body["topk"]) for query in body["queries"]]
        return {"result": [[{"document": {"id": "0", "contents": text}, "score": 1.0} for text in f] for f in found]}
    return {"rewards": [reward_of(query) for query in body["query"]]}


async def _send(
    writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int = 0
) -> bool:
    """Send an answer, without its last `cut` bytes."""
    lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body[: len(body) - cut])
    await writer.drain()
    return not cut


async def _send_nonsense(writer: asyncio.StreamWriter, fault: str, path: str, body: dict[str, Any]) -> bool:
    is_search = path.endswith("/retrieve")
    num = len(body["queries"] if is_search else body["query"])
    bodies: dict[str, Any] = {
        "bytes": f"{MARKER} \x00\x01".encode(),
        "nan": {"result": [[{"document": {"contents": MARKER}, "score": float("nan")}]] * num}
        if is_search
        else {"rewards": [float("nan")] * num, "detail": MARKER},
        "infinity": {"result": float("inf")} if is_search else {"rewards": [1.0] * (num - 1) + [float("inf")]},
        "short": {"result": [[]] * (num - 1)} if is_search else {"rewards": [0.5] * (num - 1)},
        "wrong_shape": {"result": {"error": MARKER}} if is_search else {"rewards": {"error": MARKER}},
        "error_page": f"<html><body>{MARKER}</body></html>".encode(),
        "huge": {"rewards": [0.5] * num, "result": [[]] * num, "padding": MARKER * 100_000},
    }
    if fault in bodies:
        content = bodies[fault]
        return await _send(writer, 200, content if isinstance(content, bytes) else json.dumps(content).encode())
    if fault == "gzip_bomb":
        return await _send(writer, 200, gzip.compress(b" " * (1 << 24)), {"content-encoding": "gzip"})
    if fault == "redirect":
        return await _send(writer, 302, MARKER.encode(), {"location": "http://127.0.0.1:1/elsewhere"})
    if fault == "cut_off":
        return await _send(writer, 200, json.dumps(_right(path, body)).encode(), cut=5)
    writer.write(b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\n")
    chunk, pause_s = (b"[" * 65536, 0.0) if fault == "endless" else (b" ", 0.05)
    while True:
        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        await writer.drain()
        await asyncio.sleep(pause_s)


async def _main(seed: int) -> None:
    service = _Service(seed)
    await service.open()
    print(f"http://127.0.0.1:{service.port}", flush=True)
    # Its standard input ends with whoever started it.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(_main(parser.parse_args().seed))
