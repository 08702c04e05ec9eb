"""A rollout server's weight controls over TCP, on connections that are kept: what Ray's calls are in a cluster.

A call into a cut link hangs, as Ray's do, until whoever asked gives it up.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from protocol.weights.controls import Attempt

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
