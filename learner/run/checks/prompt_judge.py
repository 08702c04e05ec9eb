"""Which prompts the policy can be given: those its tokenizer can write, with room for an answer.

Most need no tokenizer: a text has no more tokens than bytes. The others are encoded; chat messages in a process of its
own, because rendering them imports torch.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenizers import Tokenizer

from learner.data.prompt_reading import Refusal
from learner.data.prompts import Prompt
from learner.run.checks.chat_lengths import Measured, measure
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

# Tokens that a tokenizer adds around a text: marks of its beginning and end.
_ADDED_TOKENS = 64
_Signature = tuple[tuple[str, ...], ...]


class PromptJudge:
    """Says of prompts why they cannot be used. Holds a process while it is used with chat messages.

    max_tokens: longest prompt that is wanted; None: any for which the context has room.
    """

    def __init__(self, model: Path, settings: Settings, max_tokens: int | None = None) -> None:
        rollout = settings.rollout
        self._model = model
        self._trust_remote_code = settings.policy.trust_remote_code
        self._context, self._response = rollout.max_context_tokens, rollout.max_response_tokens
        self._max_tokens = max_tokens
        self._room = min(self._context - self._response, max_tokens or self._context)
        self._fast: Tokenizer | None = None
        self._child: ProcessPoolExecutor | None = None
        self._template_bytes: dict[_Signature, int] = {}  # what the chat template adds to messages of these roles

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.shutdown(cancel_futures=True)

    def __call__(self, prompts: Sequence[Prompt]) -> list[Refusal | None]:
        """Return for each prompt what is wrong with it, or None. Raises: SettingsError without a usable tokenizer."""
        unsure = [place for place, prompt in enumerate(prompts) if not self._surely_fits(prompt.prompt)]
        verdicts: list[Refusal | None] = [None] * len(prompts)
        is_slow = not (self._model / "tokenizer.json").is_file()
        texts = [place for place in unsure if isinstance(prompts[place].prompt, str) and not is_slow]
        for place, length in zip(texts, self._encode([str(prompts[place].prompt) for place in texts]), strict=True):
            verdicts[place] = self._verdict(length)
        others = [place for place in unsure if not isinstance(prompts[place].prompt, str) or is_slow]
        for place, measured in zip(others, self._measure([prompts[place].prompt for place in others]), strict=True):
            verdicts[place] = Refusal(measured.problem) if measured.problem else self._verdict(measured.num_tokens)
            self._learn(prompts[place].prompt, measured)
        return verdicts

    def _surely_fits(self, prompt: str | list[dict[str, Any]]) -> bool:
        if isinstance(prompt, str):
            return not prompt.isspace() and len(prompt.encode()) + _ADDED_TOKENS <= self._room
        signature = _signature(prompt)
        added = self._template_bytes.get(signature) if signature is not None else None
        return added is not None and _content_bytes(prompt) + added + _ADDED_TOKENS <= self._room

    def _learn(self, prompt: str | list[dict[str, Any]], measured: Measured) -> None:
        if isinstance(prompt, str) or measured.problem or (signature := _signature(prompt)) is None:
            return
        self._template_bytes[signature] = max(0, measured.num_bytes - _content_bytes(prompt))

    def _verdict(self, num_tokens: int) -> Refusal | None:
        if not num_tokens:
            return Refusal("has no tokens for the tokenizer of policy.model.")
        if num_tokens <= self._room:
            return None
        for_context = self._context - self._response
        if num_tokens <= for_context:
            reason = f"has {num_tokens} tokens, more than data.max_prompt_tokens = {self._max_tokens}."
            return Refusal(reason, is_overlong=True, is_asked_for=True)
        return Refusal(
            f"has {num_tokens} tokens; rollout.max_context_tokens = {self._context} less rollout.max_response_tokens = "
            f"{self._response} leaves {for_context}. Raise the first, or shorten the prompt.",
            is_overlong=True,
        )

    def _encode(self, texts: Sequence[str]) -> list[int]:
        if not texts:
            return []
        try:
            self._fast = self._fast or Tokenizer.from_file(str(self._model / "tokenizer.json"))
            return [len(encoding.ids) for encoding in self._fast.encode_batch(list(texts))]
        except Exception as error:  # the tokenizers library raises Exception itself
            raise self._unusable(error) from error

    def _measure(self, prompts: Sequence[str | list[dict[str, Any]]]) -> list[Measured]:
        if not prompts:
            return []
        if self._child is None:
            self._child = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            return self._child.submit(measure, self._model, self._trust_remote_code, list(prompts)).result()
        except BrokenProcessPool as error:
            raise self._unusable(error) from error
        except Exception as error:  # a tokenizer that cannot be loaded raises anything
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> SettingsError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return SettingsError(f"settings: the tokenizer of policy.model = {self._model} cannot be used: {reason[:300]}")


def _signature(messages: Sequence[dict[str, Any]]) -> _Signature | None:
    """Return what decides how a template treats messages, their texts apart; None when they hold more than texts."""
    parts = []
    for message in messages:
        if len(message) != 2 or not isinstance(message["content"], str) or not message["content"].strip():
            return None
        parts.append((str(message["role"]),))
    return tuple(parts)


def _content_bytes(messages: Sequence[dict[str, Any]]) -> int:
    return sum(len(message["content"].encode()) for message in messages)
