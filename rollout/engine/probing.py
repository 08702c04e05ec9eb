"""What an engine computes of the learner's fixed text: asked for once, it is asked for again behind each commit.

So the text is in the first step that new weights make, and the learner's call finds the answer on its way: otherwise it
would wait for messages to and fro and for a step of what is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from protocol.errors import NeighbourError

_BOUNDARY = "engine"
Ask = Callable[[list[int], str, bool], Awaitable[Any]]
"""(a text, the salt of what is cached, whether that is read) -> vLLM's output: the text's logprobs, and one token."""


@dataclass(frozen=True)
class _Ahead:
    """What was asked for before anybody waited for it."""

    tokens: list[int]
    salt: str  # of the weights that answer
    answer: asyncio.Task[Any]


class Probing:
    """One engine's. salt: the name under which vLLM caches keys and values of these weights and of no others."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._asked: list[int] | None = None  # of the weights that are in use; None: nothing yet
        self._ahead: _Ahead | None = None

    def begin(self, salt: str) -> None:
        """Ask for the text that was asked for last, if the weights before were asked for it.

        The weights' commit must have been sent: vLLM takes messages in order, and begins nothing while they change.
        """
        self.give_up()
        tokens, self._asked = self._asked, None
        if tokens is not None:
            answer = asyncio.ensure_future(self._ask(tokens, salt, True))
            answer.add_done_callback(_heard)
            self._ahead = _Ahead(tokens, salt, answer)

    def give_up(self) -> None:
        """Ask for nothing any more that nobody waits for."""
        if self._ahead is not None:
            self._ahead.answer.cancel()
            self._ahead = None

    async def logprobs(self, tokens: list[int], salt: str, version: int, *, is_first: bool) -> list[float]:
        """Return the logprobs of tokens[1:] by the weights of a version, natural log at temperature 1.

        is_first: nothing was asked of the weights yet, so that nothing may be cached.
        Raises: NeighbourError when something is, or vLLM fails.
        """
        result = await self._answered_ahead(tokens, salt, version)
        if result is not None:
            is_first = True
        else:
            result = await self._ask(tokens, salt, is_first)
        self._asked = tokens
        if is_first and result.num_cached_tokens:
            held = f"{result.num_cached_tokens} tokens' keys and values cached under other weights"
            raise NeighbourError(_BOUNDARY, f"would go on from {held} than version {version}'s")
        return list(result.prompt_logprobs.logprobs)

    async def _answered_ahead(self, tokens: list[int], salt: str, version: int) -> Any | None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if (ahead.tokens, ahead.salt) != (tokens, salt):
            ahead.answer.cancel()
            return None
        result = await ahead.answer
        spans = result.outputs[0].weight_versions
        return result if [int(span.version) for span in spans] == [version] else None


def _heard(answer: asyncio.Task[Any]) -> None:
    """Take note of how it ended: of what nobody waits for, nobody else would."""
    if not answer.cancelled():
        answer.exception()
