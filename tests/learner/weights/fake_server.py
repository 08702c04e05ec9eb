"""Rollout servers without an engine: the receiving half of the wire in threads of this process.

Each fails on command in one exact state of a push.
"""

import asyncio
import threading
from functools import partial
from typing import Any

import torch

from protocol.weights.controls import Attempt
from protocol.weights.digest import WeightDigest
from protocol.weights.group import PEER_LOST, BroadcastGroup, GlooGroup, PeerLostError, in_thread
from protocol.weights.same_machine import SameMachineGroup, card_address
from protocol.weights.wire import bucket_num_bytes, read_update_message
from tests.fakes.planned_weights import bucket_views


class FakeServer:
    """A rollout server without an engine.

    fault: (state, "raise" | "hang" | "wait" | "lose a peer"); the state "bucket" is after the first bucket. then: the
    fault that takes its place once it happened. waits_for: what ends a wait. is_silent: pings are not answered.
    num_workers: its tensor-parallel size; each worker is a rank of the group.
    """

    def __init__(
        self,
        name: str,
        fault: tuple[str, str] | None = None,
        then: tuple[str, str] | None = None,
        num_workers: int = 1,
    ) -> None:
        self.name = name
        self.fault = fault
        self.then = then
        self.waits_for = threading.Event()
        self.calls: list[str] = []
        self.is_silent = False
        self.delay_s = 0.0
        self.pause_s = 0.25  # what it says of each push
        self.version: int | None = None
        self.digest: str | None = None  # of what it was last told to commit
        self.served: int | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.inits: list[dict[str, Any]] = []
        self.attempts: list[Attempt] = []  # those to join
        self._workers = range(num_workers)
        self._groups: list[BroadcastGroup] = []
        self._digests: set[str] = set()
        self._update: dict[str, Any] = {}
        self._released = threading.Event()

    @property
    def is_joined(self) -> bool:
        return bool(self._groups)

    async def ping(self) -> None:
        if self.is_silent:
            await asyncio.sleep(3600)

    async def join_weights(self, attempt: Attempt, init: dict[str, Any], timeout_s: float) -> None:
        await self._enter("join")
        self.inits.append(init)
        self.attempts.append(attempt)
        self._lose_groups()
        self._groups = await self._there(self._join, init)

    async def sleep(self, attempt: Attempt) -> None:
        await self._enter("sleep")

    async def wake(self, attempt: Attempt) -> None:
        await self._enter("wake")

    async def prepare(self, attempt: Attempt, update: dict[str, Any]) -> None:
        await self._enter("prepare")
        self._update = update

    async def receive(self, attempt: Attempt) -> None:
        await self._enter("receive")
        self.version = None
        self._digests = set(await self._there(self._receive, self._update))

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        await self._enter("commit")
        self.digest = digest
        if {digest} != self._digests:
            raise ValueError(f"weight digest differs: sent {digest}, received {self._digests}")
        self.version = version
        return self.pause_s

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        await self._enter("probe")
        return [-float(token) for token in tokens[1:]]

    async def serve(self, attempt: Attempt, version: int) -> None:
        await self._enter("serve")
        self.served = version

    async def leave(self, attempt: Attempt) -> None:
        await self._enter("leave")
        self._lose_groups()

    def release(self) -> None:
        """End its hanging threads."""
        self._released.set()

    async def _enter(self, state: str) -> None:
        self.calls.append(state)
        await asyncio.sleep(self.delay_s)
        if self.fault is None or self.fault[0] != state:
            return
        kind, self.fault = self.fault[1], self.then or self.fault
        if kind == "raise":
            self._lose_groups()
            raise ConnectionError(f"{self.name} is gone")
        if kind == "lose a peer":
            raise PeerLostError(PEER_LOST, "closed")
        if kind == "hang":
            await asyncio.sleep(3600)
        while not self.waits_for.is_set():
            await asyncio.sleep(0.01)

    def _lose_groups(self) -> None:
        """Have its connections closed, as a process that ends has."""
        for group in self._groups:
            group.close()
        self._groups = []

    async def _there(self, call: Any, argument: Any) -> list[Any]:
        """Return what each worker's call came to; as in a worker, none waits for an earlier one to end."""
        calls = [in_thread(self.name, partial(call, worker, argument)) for worker in self._workers]
        return await asyncio.gather(*map(asyncio.wrap_future, calls))

    def _join(self, worker: int, init: dict[str, Any]) -> BroadcastGroup:
        if "server" in init:
            name = card_address(init["name"], init["first_worker"] + worker)
            return SameMachineGroup.receive(name, init["deadline_s"], init["server"])
        if "name" in init:
            return SameMachineGroup.receive(init["name"], init["deadline_s"])
        return GlooGroup.join(init, worker)

    def _receive(self, worker: int, update: dict[str, Any]) -> str:
        groups = self._groups
        plan = read_update_message(update)
        digest = WeightDigest(plan)
        for bucket in plan:
            flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8)
            groups[worker].broadcast(flat)
            digest.add(flat)
            self.weights |= {name: view.clone() for name, view in bucket_views(flat, bucket)}
            if self.fault == ("bucket", "raise"):
                self._lose_groups()
                raise ConnectionError(f"{self.name} is gone")
            if self.fault == ("bucket", "hang"):
                self._released.wait()
                return ""
        return digest.hexdigest()
