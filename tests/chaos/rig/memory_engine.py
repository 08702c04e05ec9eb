"""An engine whose tokens tell which weights wrote them: real gloo groups, wire and digest, a memory of plain floats.

Every number of version 7 is 7.0. A token is (the version that it is said to be of, a number of the memory as it was
when the token was written): they differ when a token is labelled with weights that it is not of.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from protocol.errors import NeighbourError
from protocol.weights.group import GlooGroup, ReceivedPush, in_thread
from protocol.weights.wire import Bucket, read_update_message
from tests.fakes.engines import PacedEngine
from tests.fakes.planned_weights import bucket_views

Token = tuple[int, float]
Staged = list[tuple[Bucket, torch.Tensor]]


class MemoryEngine(PacedEngine):
    """It generates while it receives into a second copy, as a real engine does over gloo.

    on_bucket: called in the receiving thread after each bucket that came.
    """

    def __init__(self, seed: int, token_s: float = 0.01) -> None:
        super().__init__(seed, token_s, mean_tokens=1.0)
        self.on_bucket: Callable[[], None] = lambda: None
        self._memory: dict[str, torch.Tensor] = {}
        self._group: GlooGroup | None = None
        self._plan: tuple[Bucket, ...] = ()
        self._received = ReceivedPush()
        self._staged: Staged | None = None

    async def write(self, num_tokens: int) -> list[Token]:
        """Return the next tokens. Raises: NeighbourError when the weights are lost meanwhile."""
        tokens: list[Token] = []
        for _ in range(num_tokens):
            await asyncio.sleep(self._token_s)
            await self._may_write.wait()
            if self.policy_version is None:
                raise NeighbourError("engine", "lost its weights")
            memory = self._random.choice(list(self._memory.values()))
            tokens.append((self.policy_version, float(memory[self._random.randrange(len(memory))])))
        return tokens

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        self._staged = self._group = None
        self._group = await asyncio.wrap_future(in_thread("weight-group", partial(GlooGroup.join, init)))

    async def prepare(self, update: dict[str, Any]) -> None:
        self._plan, self._received, self._staged = read_update_message(update), ReceivedPush(), None

    async def receive(self) -> None:
        group, plan, received = self._group, self._plan, self._received
        if group is None:
            raise NeighbourError("engine", "weight push before this server joined a weight group")

        def take() -> Staged:
            staged: Staged = []
            for pair in received.buckets(plan, group.device, group.broadcast):
                staged.append(pair)
                self.on_bucket()
            return staged

        staged = await asyncio.wrap_future(in_thread("weight-receive", take))
        if received is self._received:  # no later push has begun
            self._staged = staged

    async def commit(self, version: int, digest: str) -> float:
        begun, staged = perf_counter(), self._staged
        if staged is None:
            raise NeighbourError("engine", "cannot commit: nothing was received")
        self._may_write.clear()
        self.policy_version, self._staged = None, None
        self._received.confirm(digest)
        for bucket, flat in staged:
            for name, view in bucket_views(flat, bucket):
                self._memory.setdefault(name, torch.zeros_like(view)).copy_(view)
                await asyncio.sleep(0)  # whoever writes on while weights are loaded sees both
        self.policy_version = version
        self._may_write.set()
        return perf_counter() - begun

    async def leave(self) -> None:
        self._group = self._staged = None


def weights_of(version: int, num_tensors: int, num_floats: int) -> list[tuple[str, torch.Tensor]]:
    """Return what is pushed as this version."""
    return [(f"layer.{place}", torch.full((num_floats,), float(version))) for place in range(num_tensors)]
