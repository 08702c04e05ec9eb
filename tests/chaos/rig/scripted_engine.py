"""An engine that writes at a given pace, with `Engine`'s interface: for volume, where vLLM cannot.

It keeps what matters to the accounts: tokens take time, their number is drawn per request with a long tail, a pause
freezes them in their middle, and each token carries the version that was held when it was written.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from protocol.errors import NeighbourError
from rollout.engine.generation import EngineStats, Generation, Sampling
from tests.fakes.rollout_fakes import CharacterTokenizer

_SLICE = 16


class PacedEngine:
    """It generates while a push is received, as over gloo.

    token_s: seconds for one token of one request. mean_tokens: of a generation, exponentially distributed.
    """

    def __init__(self, seed: int, token_s: float, mean_tokens: float) -> None:
        self.policy_version: int | None = None
        self.is_alive = True
        self.generates_while_receiving = True
        self.tokenizer = CharacterTokenizer()
        self._random = random.Random(seed)
        self._token_s = token_s
        self._mean_tokens = mean_tokens
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._num_in_flight = 0
        self._num_output_tokens = 0

    @property
    def stats(self) -> EngineStats:
        return EngineStats(self._num_in_flight, self._num_output_tokens, not self._may_write.is_set())

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        if self.policy_version is None:
            raise NeighbourError("engine", "serves nothing")
        num_tokens = min(sampling.max_tokens, 1 + int(self._random.expovariate(1 / self._mean_tokens)))
        self._num_in_flight += 1
        try:
            spans = await self._write(num_tokens)
        finally:
            self._num_in_flight -= 1
        self._num_output_tokens += num_tokens
        text = "".join(self._random.choice("abcdefgh") for _ in range(num_tokens))
        return Generation(
            tokens=[ord(character) for character in text],
            logprobs=[-1.0] * num_tokens,
            version_spans=tuple(spans),
            finish_reason="stop",
            stop_string=None,
            text=text,
        )

    async def _write(self, num_tokens: int) -> list[tuple[int, int, int]]:
        spans: list[tuple[int, int, int]] = []
        for start in range(0, num_tokens, _SLICE):
            end = min(num_tokens, start + _SLICE)
            await asyncio.sleep((end - start) * self._token_s)
            await self._may_write.wait()
            if self.policy_version is None:
                raise NeighbourError("engine", "lost its weights")
            if spans and spans[-1][2] == self.policy_version:
                spans[-1] = (spans[-1][0], end, self.policy_version)
            else:
                spans.append((start, end, self.policy_version))
        return spans

    def forget_weights(self) -> None:
        self.policy_version = None

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        """Nothing to join: versions come by command."""

    async def sleep(self) -> None:
        self._may_write.clear()

    async def wake(self) -> None:
        self._may_write.set()

    async def prepare(self, update: dict[str, Any]) -> None:
        """Where to receive is a matter of those that do."""

    async def receive(self) -> None:
        """Nothing to receive: versions come by command."""

    async def commit(self, version: int, digest: str) -> float:
        self.policy_version = version
        return 0.0

    async def leave(self) -> None:
        self._may_write.set()

    async def probe(self, tokens: list[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    def shutdown(self) -> None:
        self.is_alive = False
