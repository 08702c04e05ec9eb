"""The receiving half of a weight push without an engine: real store, gloo group, wire and digest, plain tensors.

`ServerControls` for chaos commands; the pusher's event loop calls it, a thread of its own receives.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from protocol.weights.controls import Attempt
from protocol.weights.digest import WeightDigest
from protocol.weights.group import GlooGroup, reach_store
from protocol.weights.wire import bucket_num_bytes, read_update_message


class ReceivingServer:
    """`version` and `digest`: of what was committed last, unless it was refused."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version: int | None = None
        self.digest: str | None = None
        self._received: str | None = None
        self._update: dict[str, Any] = {}
        self._group: GlooGroup | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)

    async def ping(self) -> None:
        pass

    async def join_weights(self, attempt: Attempt, init: dict[str, Any], timeout_s: float) -> None:
        def meet() -> GlooGroup:
            store = reach_store(init["address"], init["port"], init["deadline_s"])
            return GlooGroup(store, init["key"], 1, init["world_size"], init["address"], init["deadline_s"])

        self._group = await self._there(meet)

    async def prepare(self, attempt: Attempt, update: dict[str, Any]) -> None:
        self._update, self._received = update, None

    async def receive(self, attempt: Attempt) -> None:
        self._received = await self._there(self._take, self._update)

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        self.version = self.digest = None
        if digest != self._received:
            raise ValueError(f"weight digest differs: sent {digest}, received {self._received}")
        self.version, self.digest = version, digest
        return 0.0

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        return [0.0] * (len(tokens) - 1)

    async def serve(self, attempt: Attempt, version: int) -> None:
        pass

    async def leave(self, attempt: Attempt) -> None:
        self._group = None

    def _take(self, update: dict[str, Any]) -> str:
        plan = read_update_message(update)
        digest = WeightDigest(plan)
        for bucket in plan:
            flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8)
            assert self._group is not None
            self._group.broadcast(flat)
            digest.add(flat)
        return digest.hexdigest()

    async def _there(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
