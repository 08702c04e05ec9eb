"""Engines for tests with the interface of `rollout.engine.engine.Engine`.

FakeEngine        weight verbs that only record their calls; base of the others
ScriptedEngine    writes a function's text, one token per character
TokenizingEngine  the same in a real tokenizer's tokens
PacedEngine       random text at a given pace, with the version of each token
PushedEngine      PacedEngine whose versions come by real pushes to a receiver
PlainEngine       a DeepSpeed engine's part of a training step
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import NeighbourError
from rollout.engine.generation import EngineStats, Generation, Sampling

BOS = 1
_SLICE = 16
_ATTEMPT = ("", 0)  # receivers in tests accept every attempt


class CharacterTokenizer:
    """One token per character, its code point; a BOS in front by default."""

    def __len__(self) -> int:
        return 0x110000

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [ord(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("<bos>" if token == BOS else chr(token) for token in tokens)

    def apply_chat_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool, tokenize: bool) -> str:
        assert not tokenize
        if any("content" not in message for message in messages):
            raise ValueError("a message has no content")
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        return text + "[assistant]" * add_generation_prompt


class FakeEngine:
    """Holds a version and records calls; a subclass generates. calls: names of the weight verbs, in order."""

    tokenizer: Any
    end_tokens: frozenset[int] = frozenset()

    def __init__(self, version: int | None = 0) -> None:
        self.policy_version = version
        self.on_tokens: Callable[[str, int], None] = lambda request_id, num_tokens: None
        self.is_alive = True
        self.tokenizer = CharacterTokenizer()
        self.calls: list[str] = []
        self.generates_while_receiving = True
        self._num_in_flight = 0
        self._num_output_tokens = 7  # of the run before

    @property
    def stats(self) -> EngineStats:
        return EngineStats(self._num_in_flight, self._num_output_tokens, False)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        raise NotImplementedError

    def forget_weights(self) -> None:
        self.calls.append("forget_weights")
        self.policy_version = None

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        self.calls.append("join_weights")

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def prepare(self, update: dict[str, Any]) -> None:
        self.calls.append("prepare")
        if not self.generates_while_receiving:
            self.policy_version = None

    async def receive(self) -> None:
        self.calls.append("receive")

    async def commit(self, version: int, digest: str) -> float:
        self.calls.append("commit")
        if digest == "wrong":
            self.policy_version = None
            raise NeighbourError("engine", "weight digest differs")
        self.policy_version = version
        return 0.125

    async def leave(self) -> None:
        self.calls.append("leave")

    async def probe(self, tokens: list[int]) -> list[float]:
        if self.policy_version is None:
            raise NeighbourError("engine", "holds no verified weights to probe")
        return [-float(self.policy_version)] * (len(tokens) - 1)

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.is_alive = False


@dataclass(frozen=True)
class Written:
    """A scripted turn. versions: (number of tokens, policy version) pairs; None: all by the current version."""

    text: str
    finish_reason: str | None = None
    versions: tuple[tuple[int, int], ...] | None = None
    first_logprob: float = -0.125


class ScriptedEngine(FakeEngine):
    """Writes what `write(context)` returns; token i of a turn has the logprob first_logprob * (i + 1).

    Stops by stop string, then by max_tokens, as an engine does. `is_slow`: generations wait for `release()`.
    requests: (context, sampling, request id, version) of every request, refused ones included.
    """

    def __init__(self, write: Callable[[str], str | Written], version: int | None = 0) -> None:
        super().__init__(version)
        self.requests: list[tuple[str, Sampling, str, int | None]] = []
        self.is_slow = False
        self.write = write
        self._released = asyncio.Event()

    def release(self) -> None:
        self._released.set()

    def die(self) -> None:
        """Fail all present and later requests, as vLLM does when its process has ended."""
        self.is_alive = False
        self.release()

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        context = self.decode(prompt_tokens)
        self.requests.append((context, sampling, request_id, self.policy_version))
        if self.policy_version is None:
            raise NeighbourError("engine", "serves nothing")
        self._num_in_flight += 1
        try:
            await (self._released.wait() if self.is_slow else asyncio.sleep(0))
        finally:
            self._num_in_flight -= 1
        if not self.is_alive:
            raise NeighbourError("engine", f"request {request_id} died with the engine")
        generation = _generation(self.write(context), sampling, self.policy_version)
        self._num_output_tokens += len(generation.tokens)
        self.on_tokens(request_id, len(generation.tokens))
        return generation


def first_stop(text: str, sampling: Sampling) -> tuple[str, str | None]:
    """Return the text up to and with the first stop string, and that string."""
    ends = [(text.find(stop) + len(stop), stop) for stop in sampling.stop if stop in text]
    end, stop_string = min(ends, default=(len(text), None))
    return text[:end], stop_string


def _generation(written: str | Written, sampling: Sampling, version: int) -> Generation:
    written = Written(written) if isinstance(written, str) else written
    (text, stop_string), reason = first_stop(written.text, sampling), "stop"
    if len(text) > sampling.max_tokens:
        text, stop_string, reason = text[: sampling.max_tokens], None, "length"
    spans, start = [], 0
    for num_tokens, by in written.versions or ((len(text), version),):
        spans.append((start, start + num_tokens, by))
        start += num_tokens
    return Generation(
        tokens=[ord(character) for character in text],
        logprobs=[written.first_logprob * (i + 1) for i in range(len(text))],
        version_spans=tuple(spans),
        finish_reason=written.finish_reason or reason,
        stop_string=stop_string,
        text=text,
    )


class TokenizingEngine(ScriptedEngine):
    """Writes what `write(context)` returns, as its tokenizer's tokens, names of control tokens as those tokens.

    Stops behind the first stop string, then at max_tokens, as an engine does.
    """

    def __init__(self, write: Callable[[str], str], tokenizer: Any) -> None:
        super().__init__(write)
        self.tokenizer = tokenizer

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        context = self.decode(prompt_tokens)
        self.requests.append((context, sampling, request_id, self.policy_version))
        text, stop_string = first_stop(str(self.write(context)), sampling)
        tokens = self.encode(text)
        is_cut = len(tokens) > sampling.max_tokens
        tokens = tokens[: sampling.max_tokens]
        self.on_tokens(request_id, len(tokens))
        return Generation(
            tokens=tokens,
            logprobs=[-0.5] * len(tokens),
            version_spans=((0, len(tokens), self.policy_version or 0),),
            finish_reason="length" if is_cut else "stop",
            stop_string=None if is_cut else stop_string,
            text=self.decode(tokens),
        )


class PacedEngine(FakeEngine):
    """Tokens take time, their number has a long tail, and a pause freezes generations in their middle.

    token_s: seconds for one token of one request. mean_tokens: of a generation, exponentially distributed.
    """

    def __init__(self, seed: int, token_s: float, mean_tokens: float) -> None:
        super().__init__(None)
        self._random = random.Random(seed)
        self._token_s = token_s
        self._mean_tokens = mean_tokens
        self._may_write = asyncio.Event()
        self._may_write.set()

    @property
    def stats(self) -> EngineStats:
        return EngineStats(self._num_in_flight, self._num_output_tokens, not self._may_write.is_set())

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        if self.policy_version is None:
            raise NeighbourError("engine", "serves nothing")
        num_tokens = min(sampling.max_tokens, 1 + int(self._random.expovariate(1 / self._mean_tokens)))
        self._num_in_flight += 1
        try:
            spans = await self._write(num_tokens, request_id)
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

    async def _write(self, num_tokens: int, request_id: str) -> list[tuple[int, int, int]]:
        spans: list[tuple[int, int, int]] = []
        for start in range(0, num_tokens, _SLICE):
            end = min(num_tokens, start + _SLICE)
            await asyncio.sleep((end - start) * self._token_s)
            await self._may_write.wait()
            if self.policy_version is None:
                raise NeighbourError("engine", "lost its weights")
            self.on_tokens(request_id, end - start)
            if spans and spans[-1][2] == self.policy_version:
                spans[-1] = (spans[-1][0], end, self.policy_version)
            else:
                spans.append((start, end, self.policy_version))
        return spans

    async def sleep(self) -> None:
        self._may_write.clear()

    async def wake(self) -> None:
        self._may_write.set()

    async def commit(self, version: int, digest: str) -> float:
        self.policy_version = version
        return 0.0

    async def leave(self) -> None:
        self._may_write.set()

    async def probe(self, tokens: list[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)


class PushedEngine(PacedEngine):
    """Takes a version once its digest was confirmed, and holds none after a refused one.

    receiver: has the verbs of `ServerControls`, such as FakeServer.
    """

    def __init__(self, receiver: Any, seed: int = 0, token_s: float = 0.0, mean_tokens: float = 1.0) -> None:
        super().__init__(seed, token_s, mean_tokens)
        self._receiver = receiver

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        await self._receiver.join_weights(_ATTEMPT, init, timeout_s)

    async def prepare(self, update: dict[str, Any]) -> None:
        await self._receiver.prepare(_ATTEMPT, update)

    async def receive(self) -> None:
        await self._receiver.receive(_ATTEMPT)

    async def commit(self, version: int, digest: str) -> float:
        self.policy_version = None
        pause_s = float(await self._receiver.commit(_ATTEMPT, version, digest))
        self.policy_version = version
        return pause_s

    async def leave(self) -> None:
        await self._receiver.leave(_ATTEMPT)


class PlainEngine:
    """The part of DeepSpeed's engine that a training step calls."""

    def __init__(self, model: Any, device: Any) -> None:
        self.model, self.device = model, device

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def backward(self, loss: Any) -> None:
        loss.backward()
