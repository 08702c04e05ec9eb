"""A turn of the policy as OpenAI's clients read it: its text, the tools it calls, why it ended."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout.engine.generation import Generation
from rollout.environments.tool_use.call_formats import CALL_FORMATS

# Where a family's calls begin; what stands before is the message's text. Llama's turn is a call as a whole.
_CALLS_BEGIN = {"hermes": "<tool_call>", "qwen3_coder": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": ""}
_THOUGHT_END = "</think>"


@dataclass(frozen=True)
class ToolCall:
    """A call that the agent is to run."""

    id: str  # of 9 characters, as some families' templates ask for
    name: str  # of the tool
    arguments: str  # JSON object


@dataclass(frozen=True)
class TurnText:
    """A turn as the agent reads it."""

    content: str  # without the token that ended it, without a stop string, without calls
    calls: list[ToolCall]  # of tools, in order
    finish: Literal["stop", "length", "tool_calls"]  # OpenAI's finish_reason
    endings: tuple[str, ...]  # how the text goes on that the tokens say, behind content: all of it, a stop string alone
    ids: list[int]  # the tokens that were sampled
    # (text, natural log of its probability) of each of them, the one that ended the turn too
    logprobs: list[tuple[str, float]]  # empty: nobody asked for them


class TurnReader:
    """Reads the turns of one model. Ids of calls are unique within it."""

    def __init__(self, tokenizer: Any, control: dict[int, str], call_format: str | None) -> None:
        """tokenizer: of this thread alone. control: id and name of each control token.

        call_format: how the model writes calls; None: in no known way, and no calls are looked for.
        """
        self._tokenizer = tokenizer
        self._control = control
        self._call_format = call_format
        self._numbers = itertools.count()

    def read(self, generation: Generation, may_call: bool, has_logprobs: bool) -> TurnText:
        """Return the turn. may_call: whether calls are looked for. has_logprobs: whether its tokens are wanted too."""
        text, endings = self._parted(generation)
        calls = self._calls(text) if may_call else []
        content = self._before_calls(text) if calls else text
        finish: Literal["stop", "length", "tool_calls"] = "tool_calls" if calls else "stop"
        if generation.finish_reason == "length":
            finish = "length"
        logprobs = self._told(generation) if has_logprobs else []
        return TurnText(content, calls, finish, endings, list(generation.tokens), logprobs)

    def _parted(self, generation: Generation) -> tuple[str, tuple[str, ...]]:
        """Return a turn's text without what ended it, and that in the forms in which a text may go on with it."""
        text, stop = generation.text, generation.stop_string
        if stop is not None:
            begin = text.rfind(stop)
            # A stop string may end inside a token.
            return text[:begin], tuple(dict.fromkeys((text[begin:], stop)))
        name = self._control.get(generation.tokens[-1], "")
        return (text.removesuffix(name), (name,)) if name else (text, ())

    def _calls(self, text: str) -> list[ToolCall]:
        """Return the calls of a turn; none where one of them cannot be read: the agent then gets the text."""
        if self._call_format is None:
            return []
        calls = CALL_FORMATS[self._call_format](text)
        if any(call.problem is not None for call in calls):
            return []
        return [
            ToolCall(f"call{next(self._numbers) % 100_000:05d}", call.name, json.dumps(dict(call.arguments)))
            for call in calls
        ]

    def _before_calls(self, text: str) -> str:
        begin = _CALLS_BEGIN[self._call_format or "llama3"]
        spoken_from = text.rfind(_THOUGHT_END) + 1
        return text[: max(text.find(begin, spoken_from), 0)].strip() if begin else ""

    def _told(self, generation: Generation) -> list[tuple[str, float]]:
        texts: Sequence[str] = [self._tokenizer.decode([token]) for token in generation.tokens]
        return list(zip(texts, generation.logprobs, strict=True))
