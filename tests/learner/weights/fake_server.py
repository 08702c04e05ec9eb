"""Rollout servers without an engine: the receiving half of the wire in threads of this process.

Each fails on command in one exact state of a push.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from protocol.weights.digest import WeightDigest
from protocol.weights.group import GlooGroup, reach_store
from protocol.weights.wire import bucket_num_bytes, bucket_views, read_update_message


class FakeServer:
    """A rollout server without an engine.

    fault: (state, "raise" | "hang" | "wait"); the state "bucket" is after the first bucket. then: the fault that takes
    its place once it happened. waits_for: what ends a wait. is_silent: pings are not answered.
    """

    def __init__(self, name: str, fault: tuple[str, str] | None = None, then: tuple[str, str] | None = None) -> None:
        self.name = name
        self.fault = fault
        self.then = then
        self.waits_for = threading.Event()
        self.calls: list[str] = []
        self.is_silent = False
        self.delay_s = 0.0
        self.pause_s = 0.25  # what it says of each push
        self.version: int | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._group: GlooGroup | None = None
        self._digest = ""
        self._update: dict[str, Any] = {}
        self._released = threading.Event()

    @property
    def is_joined(self) -> bool:
        return self._group is not None

    async def ping(self) -> None:
        if self.is_silent:
            await asyncio.sleep(3600)

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        await self._enter("join")
        self._group = await self._there(self._join, init)

    async def prepare(self, update: dict[str, Any]) -> None:
        await self._enter("prepare")
        self._update = update

    async def receive(self) -> None:
        await self._enter("receive")
        self.version = None
        await self._there(self._receive, self._update)

    async def commit(self, version: int, digest: str) -> float:
        await self._enter("commit")
        if digest != self._digest:
            raise ValueError(f"weight digest differs: sent {digest}, received {self._digest}")
        self.version = version
        return self.pause_s

    async def probe(self, tokens: list[int]) -> list[float]:
        await self._enter("probe")
        return [-float(token) for token in tokens[1:]]

    async def leave(self) -> None:
        await self._enter("leave")
        self._group = None

    def release(self) -> None:
        """End its hanging thread, and the thread that its calls run in."""
        self._released.set()
        self._thread.shutdown(wait=True)

    async def _enter(self, state: str) -> None:
        self.calls.append(state)
        await asyncio.sleep(self.delay_s)
        if self.fault is None or self.fault[0] != state:
            return
        kind, self.fault = self.fault[1], self.then or self.fault
        if kind == "raise":
            raise ConnectionError(f"{self.name} is gone")
        if kind == "hang":
            await asyncio.sleep(3600)
        while not self.waits_for.is_set():
            await asyncio.sleep(0.01)

    async def _there(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _join(self, init: dict[str, Any]) -> GlooGroup:
        store = reach_store(init["address"], init["port"], init["deadline_s"])
        return GlooGroup(
            store, init["key"], init["rank_offset"], init["world_size"], init["address"], init["deadline_s"]
        )

    def _receive(self, update: dict[str, Any]) -> None:
        plan = read_update_message(update)
        digest = WeightDigest(plan)
        for bucket in plan:
            flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8)
            assert self._group is not None
            self._group.broadcast(flat)
            digest.add(flat)
            self.weights |= {name: view.clone() for name, view in bucket_views(flat, bucket)}
            if self.fault == ("bucket", "raise"):
                self._group = None
                raise ConnectionError(f"{self.name} is gone")
            if self.fault == ("bucket", "hang"):
                self._released.wait()
                return
        self._digest = digest.hexdigest()
