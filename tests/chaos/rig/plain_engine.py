"""An engine without vLLM's model: the real receiving half of a push, and tokens that show which weights they are of.

Stands in for `rollout.engine.engine.Engine` in the short form of `tests.chaos.bad_pushes`, with its rules for versions.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

from protocol.errors import NeighbourError
from protocol.weights.digest import WeightDigest
from rollout.engine.generation import Generation, Sampling
from rollout.engine.weights.receive import GlooInit, GlooWeightEngine, ReceivedBuckets


class PlainReceiver(GlooWeightEngine):
    """`rollout.engine.weights.receive` without a model. held_digest: of what was put to use last."""

    def __init__(self) -> None:
        config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0), model_config=None)
        super().__init__(None, config, torch.device("cpu"), torch.nn.Module())
        self.held_digest: str | None = None

    def load_received(self, buckets: ReceivedBuckets) -> None:
        digest = WeightDigest([bucket for bucket, _ in buckets])
        for _, flat in buckets:
            digest.add(flat)
        self.held_digest = digest.hexdigest()


class PlainEngine:
    """Generates a token each 2 ms. seen: by version, the digests of the weights held when its tokens were written."""

    def __init__(self) -> None:
        self.policy_version: int | None = None
        self.seen: dict[int, set[str | None]] = {}
        self._receiver = PlainReceiver()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._going = asyncio.Event()
        self._going.set()
        self._is_updating = False

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        if self.policy_version is None:
            raise NeighbourError("engine", "serves nothing: its weights were not verified")
        versions: list[int] = []
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(0.002)
            await self._going.wait()
            version = self.policy_version
            self.seen.setdefault(version, set()).add(self._receiver.held_digest)
            versions.append(version)
        cuts = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
        edges = zip([0, *cuts], [*cuts, len(versions)], strict=True)
        spans = tuple((start, end, versions[start]) for start, end in edges)
        return Generation([0] * len(versions), [0.0] * len(versions), spans, "length", None, "")

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        await self._abandon()
        self._receiver.shutdown()
        await self._call(self._receiver.init_transfer_engine, GlooInit(**init))

    async def prepare(self, update: dict[str, Any]) -> None:
        await self._abandon()
        self._is_updating = True
        await self._call(self._receiver.start_weight_update)
        await self._call(self._receiver.update_weights, update)

    async def receive(self) -> None:
        receiving = await self._call(self._receiver.receiving)
        while not receiving.done():
            await asyncio.sleep(0.01)
        await self._call(receiving.result)

    async def commit(self, version: int, digest: str) -> float:
        self._going.clear()
        begun, self.policy_version = time.perf_counter(), None
        await self._call(self._receiver.update_weights, {"expected_digest": digest})
        await self._call(self._receiver.finish_weight_update)
        self._is_updating = False
        self.policy_version = version
        self._going.set()
        return time.perf_counter() - begun

    async def leave(self) -> None:
        await self._abandon()
        await self._call(self._receiver.shutdown)

    async def probe(self, tokens: list[int]) -> list[float]:
        return []

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False)

    async def _abandon(self) -> None:
        if self._is_updating:
            with suppress(NeighbourError):
                await self._call(self._receiver.update_weights, {"expected_digest": ""})
            self._is_updating = False

    async def _call(self, call: Any, *args: Any) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
        except Exception as error:  # as the real engine does at this boundary
            raise NeighbourError("engine", f"{type(error).__name__}: {error}") from error
