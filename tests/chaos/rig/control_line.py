"""A rollout server's weight controls over TCP, on connections that are kept: what Ray's calls are in a cluster.

A call into a cut link hangs, as Ray's do, until whoever asked gives it up.
"""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from protocol.weights.controls import Attempt
from tests.fakes.waiting import wait_until

HOST = "127.0.0.1"
_START_S = 300.0

_LIMIT = 1 << 20  # bytes of a line
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ControlLine:
    """The learner's end: the verbs of `protocol.weights.controls.ServerControls`."""

    def __init__(self, name: str, host: str, port: int) -> None:
        self.name = name
        self.where = (host, port)
        self._idle: list[_Connection] = []

    async def ping(self) -> None:
        await self._call("ping")

    async def join_weights(self, attempt: Attempt, init: dict[str, Any], timeout_s: float) -> None:
        await self._call("join_weights", attempt, init, timeout_s)

    async def prepare(self, attempt: Attempt, update: dict[str, Any]) -> None:
        await self._call("prepare", attempt, update)

    async def receive(self, attempt: Attempt) -> None:
        await self._call("receive", attempt)

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        pause_s: float = await self._call("commit", attempt, version, digest)
        return pause_s

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        logprobs: list[float] = await self._call("probe", attempt, tokens)
        return logprobs

    async def serve(self, attempt: Attempt, version: int) -> None:
        await self._call("serve", attempt, version)

    async def leave(self, attempt: Attempt) -> None:
        await self._call("leave", attempt)

    async def call(self, verb: str, *arguments: Any) -> Any:
        """Call anything else that the far end has. Raises: OSError, RuntimeError with what it raised."""
        return await self._call(verb, *arguments)

    async def _call(self, verb: str, *arguments: Any) -> Any:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(*self.where, limit=_LIMIT)
        try:
            writer.write(json.dumps([verb, *arguments]).encode() + b"\n")
            if not (line := await reader.readline()):
                raise ConnectionError("the connection was closed")
            answer = json.loads(line)
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


async def serve_controls(server: object, host: str, port: int) -> None:
    """Answer calls of a `ControlLine` from now on."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                verb, *arguments = json.loads(line)
                call: Callable[..., Awaitable[Any]] = getattr(server, verb)
                try:
                    reply = {"value": await call(*arguments)}
                except Exception as error:  # passed on to who asked, as Ray does
                    reply = {"error": f"{type(error).__name__}: {error}"}
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            pass  # who asked has given up
        finally:
            writer.close()

    await asyncio.start_server(answer, host, port, limit=_LIMIT)


@contextmanager
def served(arguments: Mapping[int, Sequence[str]]) -> Iterator[None]:
    """Have processes of `python -m ARGUMENTS` serve, one on each of these ports. They end when their input does."""
    processes = {
        # What gloo and vLLM print is not for who reads the figures.
        port: subprocess.Popen([sys.executable, "-m", *each], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for port, each in arguments.items()
    }
    try:
        for port, process in processes.items():
            wait_until(partial(_listens, process, port), _START_S)
        yield
    finally:
        for process in processes.values():
            with suppress(BrokenPipeError):
                process.communicate()


def _listens(process: "subprocess.Popen[bytes]", port: int) -> bool:
    assert process.poll() is None, "a server did not start"
    with suppress(OSError), socket.create_connection((HOST, port)):
        return True
    return False
