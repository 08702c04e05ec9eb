"""The engine's logprobs of the learner's fixed text, requested ahead of the learner's call.

After the first probe, the text is requested directly behind each commit. It is then part of the first step with the new
weights, and the learner's call finds the result. Without this, the call would wait for a message and an engine step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from protocol.errors import NeighbourError

_BOUNDARY = "engine"
Ask = Callable[[list[int], str, bool], Awaitable[Any]]
"""(text, salt of its cache, whether the cache is read) -> vLLM's output: the text's logprobs and one token."""


@dataclass(frozen=True)
class _EarlyProbe:
    """A request that was sent before the learner's call."""

    tokens: list[int]
    salt: str  # salt of the weights that answer
    answer: asyncio.Task[Any]


class Probing:
    """The probes of one engine. salt: the name under which vLLM caches keys and values of one version's weights."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._last: list[int] | None = None  # text that was probed under the current weights
        self._early: _EarlyProbe | None = None

    def begin(self, salt: str) -> None:
        """Request the last text under new weights, if the previous weights were probed.

        The commit must have been sent before: vLLM handles messages in order and begins nothing during a commit.
        """
        self.cancel()
        tokens, self._last = self._last, None
        if tokens is not None:
            answer = asyncio.ensure_future(self._ask(tokens, salt, True))
            answer.add_done_callback(_read_exception)
            self._early = _EarlyProbe(tokens, salt, answer)

    def cancel(self) -> None:
        """Cancel the early request."""
        if self._early is not None:
            self._early.answer.cancel()
            self._early = None

    async def logprobs(self, tokens: list[int], salt: str, version: int, *, is_first: bool) -> list[float]:
        """Return the logprobs of tokens[1:] by the weights of a version, natural log at temperature 1.

        is_first: whether these weights have had no request yet, so that nothing may be cached.
        Raises: NeighbourError when something is cached, or vLLM fails.
        """
        result = await self._early_result(tokens, salt, version)
        if result is not None:
            is_first = True
        else:
            result = await self._ask(tokens, salt, is_first)
        self._last = tokens
        if is_first and result.num_cached_tokens:
            held = f"{result.num_cached_tokens} tokens' keys and values cached under other weights"
            raise NeighbourError(_BOUNDARY, f"would continue from {held} than version {version}'s")
        return list(result.prompt_logprobs.logprobs)

    async def _early_result(self, tokens: list[int], salt: str, version: int) -> Any | None:
        early, self._early = self._early, None
        if early is None:
            return None
        if (early.tokens, early.salt) != (tokens, salt):
            early.answer.cancel()
            return None
        result = await early.answer
        spans = result.outputs[0].weight_versions
        return result if [int(span.version) for span in spans] == [version] else None


def _read_exception(answer: asyncio.Task[Any]) -> None:
    """Retrieve the exception: asyncio logs an error for one that is never retrieved."""
    if not answer.cancelled():
        answer.exception()
