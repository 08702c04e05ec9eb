"""A rollout server's weight controls, straight onto it or its `Engine` in this process, as Ray calls in a cluster."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollout.engine.engine import Engine
from rollout.server import RolloutServer

T = TypeVar("T")


class InProcessServer:
    """Made in the engine's event loop; called from the weight pusher's."""

    def __init__(self, name: str, engine: Engine | RolloutServer) -> None:
        self.name = name
        self._engine: Any = engine
        self._loop = asyncio.get_running_loop()

    async def ping(self) -> None:
        pass

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        await self._there(self._engine.join_weights(init, timeout_s))

    async def prepare(self, update: dict[str, Any]) -> None:
        await self._there(self._engine.prepare(update))

    async def receive(self) -> None:
        await self._there(self._engine.receive())

    async def commit(self, version: int, digest: str) -> float:
        return await self._there(self._engine.commit(version, digest))

    async def probe(self, tokens: list[int]) -> list[float]:
        return await self._there(self._engine.probe(tokens))

    async def serve(self, version: int) -> None:
        if isinstance(self._engine, RolloutServer):  # an engine alone serves what was committed
            await self._there(self._engine.serve(version))

    async def leave(self) -> None:
        await self._there(self._engine.leave())

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
