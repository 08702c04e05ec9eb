"""Real HTTP servers on loopback for tests: any ASGI app in a thread, a server that answers by script, a CLI process."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.http.listen import address_of, bind
from rollout.neighbours.http.pool import HttpPool
from tests.fakes.ports import free_port


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Yield the address of `app`, served by uvicorn in a thread until the block ends."""
    listener = bind("test", "127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield address_of(listener)
    finally:
        server.should_exit = True
        thread.join(60)


def free_address() -> str:
    """Return an address of this machine where nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


@dataclass(frozen=True)
class Answer:
    """What a scripted server sends. body: bytes as they are, or anything else as JSON (NaN allowed)."""

    body: Any
    status: int = 200
    delay_s: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass(frozen=True)
class Received:
    """A request that a scripted server got."""

    body: dict[str, Any]
    headers: dict[str, str]


class ScriptedServer:
    """Answers the n-th request to /NAME with the n-th answer of the script NAME, and the last one for ever after."""

    def __init__(self) -> None:
        self._scripts: dict[str, list[Answer] | Callable[[Received], Answer]] = {}
        self.received: dict[str, list[Received]] = {}
        self.most_at_once: dict[str, int] = {}
        self._at_once: dict[str, int] = {}
        self.address = ""

    def script(self, name: str, *answers: Answer) -> str:
        """Return the URL that gives these answers in turn."""
        self._scripts[name] = list(answers)
        return self._url(name)

    def script_by(self, name: str, answer: Callable[[Received], Answer]) -> str:
        """Return the URL whose answer depends on the request."""
        self._scripts[name] = answer
        return self._url(name)

    def app(self) -> Starlette:
        answer: Callable[[Request], Awaitable[Response]] = self._answer
        return Starlette(routes=[Route("/{name:path}", answer, methods=["POST"])])

    def _url(self, name: str) -> str:
        self.received[name] = []
        self._at_once[name] = self.most_at_once[name] = 0
        return f"{self.address}/{name}"

    async def _answer(self, request: Request) -> Response:
        name = request.path_params["name"]
        received = Received(await request.json(), dict(request.headers))
        self.received[name].append(received)
        script = self._scripts[name]
        answer = script(received) if callable(script) else script[min(len(self.received[name]), len(script)) - 1]
        self._at_once[name] += 1
        self.most_at_once[name] = max(self.most_at_once[name], self._at_once[name])
        await asyncio.sleep(answer.delay_s)
        self._at_once[name] -= 1
        return Response(answer.encoded(), answer.status, answer.headers)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """Yield a scripted server that is served; it has no scripts yet."""
    server = ScriptedServer()
    with serving(server.app()) as address:
        server.address = address
        yield server


@contextmanager
def counted_posts() -> Iterator[Counter[str]]:
    """Yield the requests of all reward services, retrievers and tools meanwhile, by URL: retries and vain ones too."""
    posts: Counter[str] = Counter()
    post = HttpPool.post

    async def counted(pool: HttpPool, url: str, *more: Any) -> Any:
        posts[url] += 1
        return await post(pool, url, *more)

    with mock.patch.object(HttpPool, "post", counted):
        yield posts


def run_module(*arguments: str, timeout_s: float = 240.0) -> "subprocess.CompletedProcess[str]":
    """Return the finished `python -m ARGUMENTS`, with its output as text."""
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=timeout_s, env=_environment()
    )


@contextmanager
def module_serving(*arguments: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Yield the address that `python -m ARGUMENTS --port 0` prints last on a line, and the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(),
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:  # a model that loads shows its progress first
            lines.append(line)
            if "http://" in line:
                break
        else:
            raise AssertionError("".join(lines))
        yield line.split()[-1], process
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
