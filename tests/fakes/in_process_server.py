"""A rollout server's weight controls, straight onto it or its `Engine` in this process, as Ray calls in a cluster."""

import asyncio
from typing import Any

from protocol.weights.controls import Attempt
from rollout.engine.engine import Engine
from rollout.server import RolloutServer


class InProcessServer:
    """Made in the engine's event loop; called from the weight pusher's."""

    def __init__(self, name: str, engine: Engine | RolloutServer) -> None:
        self.name = name
        self._engine: Any = engine
        self._loop = asyncio.get_running_loop()

    async def ping(self) -> None:
        pass

    async def join_weights(self, attempt: Attempt, init: dict[str, Any], timeout_s: float) -> None:
        await self._call("join_weights", attempt, init, timeout_s)

    async def sleep(self, attempt: Attempt) -> None:
        await self._call("sleep", attempt)

    async def wake(self, attempt: Attempt) -> None:
        await self._call("wake", attempt)

    async def prepare(self, attempt: Attempt, update: dict[str, Any]) -> None:
        await self._call("prepare", attempt, update)

    async def receive(self, attempt: Attempt) -> None:
        await self._call("receive", attempt)

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        return float(await self._call("commit", attempt, version, digest))

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        return list(await self._call("probe", attempt, tokens))

    async def serve(self, attempt: Attempt, version: int) -> None:
        if isinstance(self._engine, RolloutServer):  # an engine alone serves what was committed
            await self._call("serve", attempt, version)

    async def leave(self, attempt: Attempt) -> None:
        await self._call("leave", attempt)

    async def _call(self, verb: str, attempt: Attempt, *arguments: Any) -> Any:
        """Call the server's verb, or the engine's, which does not ask whose call it is."""
        told = (attempt, *arguments) if isinstance(self._engine, RolloutServer) else arguments
        call = getattr(self._engine, verb)(*told)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
