"""Requests that keep an engine busy while it is pushed to, and what came of each."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import NeighbourError
from rollout.engine.generation import Generation, Sampling

_PROMPT_TOKENS = 16
_FIRST_TOKEN, _LAST_TOKEN = 6, 261


class Answered(msgspec.Struct):
    """One request and what came of it."""

    prompt: list[int]
    begun_at: float  # time.monotonic, of all processes
    ended_at: float
    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]  # start, end, policy version
    finish: str  # vLLM's reason; the refusal where there was one

    def tokens_between(self, begin: float, end: float) -> float:
        """Return how many of its tokens were written in this time, as if it had been written evenly."""
        common_s = min(end, self.ended_at) - max(begin, self.begun_at)
        return max(0.0, common_s) / (self.ended_at - self.begun_at) * len(self.tokens)


class EndlessRequests:
    """So many requests at any time: whenever one ends the next begins."""

    def __init__(self, engine: Any, num_requests: int, num_tokens: int) -> None:
        """num_tokens: the most that one writes; some begin as if they were under way, so that they end in turn."""
        self._engine = engine
        self._num_tokens = num_tokens
        self._answered: list[Answered] = []
        self._is_ending = False
        self._asking = [asyncio.create_task(self._ask_on(number, num_requests)) for number in range(num_requests)]

    async def end(self, path: Path) -> None:
        """Write all answers to a file, once the last request has ended."""
        self._is_ending = True
        await asyncio.gather(*self._asking)
        path.write_bytes(msgspec.msgpack.encode(self._answered))

    async def _ask_on(self, number: int, num_requests: int) -> None:
        draw = random.Random(number)
        asked, num_tokens = 0, max(8, self._num_tokens * (number + 1) // num_requests)
        while not self._is_ending:
            prompt = [draw.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(_PROMPT_TOKENS)]
            begun_at = time.monotonic()
            try:
                answer = await self._engine.generate(prompt, Sampling(num_tokens, 1.0), f"{number}-{asked}")
            except NeighbourError as error:
                answer = Generation([], [], (), str(error), None, "")
                await asyncio.sleep(0.02)
            self._answered.append(
                Answered(
                    prompt,
                    begun_at,
                    time.monotonic(),
                    answer.tokens,
                    answer.logprobs,
                    list(answer.version_spans),
                    answer.finish_reason,
                )
            )
            asked, num_tokens = asked + 1, self._num_tokens


def read_answers(path: Path) -> list[Answered]:
    return msgspec.msgpack.decode(path.read_bytes(), type=list[Answered])
