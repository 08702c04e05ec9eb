"""Fakes of the rollout room with the real interfaces: an engine that writes by script, rewards and a coordinator."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from protocol.errors import NeighbourError
from protocol.node.home import Keys
from protocol.settings.rewards import RetrieverSettings, RewardsSettings
from protocol.settings.rollout import RolloutSettings
from protocol.settings.run_spec import RunSpec
from protocol.wire import messages as m
from protocol.wire.channel import KeyPair, RouterChannel
from protocol.wire.codec import Decoder, encode
from rollout.engine.generation import EngineStats, Generation, Sampling
from rollout.neighbours.reward_client import Score, ScoreRequest

M = TypeVar("M")
BOS = 1


class CharacterTokenizer:
    """One token per character, its code point; a BOS in front by default."""

    def __len__(self) -> int:
        return 0x110000

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [ord(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("<bos>" if token == BOS else chr(token) for token in tokens)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> list[int]:
        assert tokenize
        assert not return_dict
        if any("content" not in message for message in messages):
            raise ValueError("a message has no content")
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        return self.encode(text + "[assistant]" * add_generation_prompt, add_special_tokens=False)


@dataclass(frozen=True)
class Written:
    """A scripted turn. versions: (number of tokens, policy version) pairs; None: all by the current version."""

    text: str
    finish_reason: str | None = None
    versions: tuple[tuple[int, int], ...] | None = None
    first_logprob: float = -0.125


class ScriptedEngine:
    """Writes what `write(context)` returns; token i of a turn has the logprob first_logprob * (i + 1).

    Stops by stop string, then by max_tokens, as an engine does. `is_slow`: generations wait for `release()`.
    """

    def __init__(self, write: Callable[[str], str | Written], version: int | None = 0) -> None:
        self.policy_version = version
        self.is_alive = True
        self.tokenizer = CharacterTokenizer()
        self.calls: list[str] = []
        self.requests: list[tuple[str, Sampling, str, int | None]] = []  # those that it refuses too
        self.is_slow = False
        self.generates_while_receiving = True
        self.write = write
        self._released = asyncio.Event()
        self._num_in_flight = 0
        self._num_output_tokens = 0

    @property
    def stats(self) -> EngineStats:
        return EngineStats(self._num_in_flight, self._num_output_tokens, False)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def release(self) -> None:
        self._released.set()

    def die(self) -> None:
        """Fail what is generated, and all that comes from now on, as vLLM does whose process has ended."""
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
        return generation

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


def _generation(written: str | Written, sampling: Sampling, version: int) -> Generation:
    written = Written(written) if isinstance(written, str) else written
    text, stop_string, reason = written.text, None, "stop"
    ends = [(text.find(stop) + len(stop), stop) for stop in sampling.stop if stop in text]
    if ends:
        end, stop_string = min(ends)
        text = text[:end]
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


class ScriptedScorer:
    """Gives `reward` to everything under the part "fake", or raises it when it is an error; after `delay_s`."""

    def __init__(self, reward: float | NeighbourError = 1.0) -> None:
        self.reward = reward
        self.delay_s = 0.0
        self.is_accepting = True
        self.requests: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> Score:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        if isinstance(self.reward, NeighbourError):
            raise self.reward
        return Score(self.reward, {"fake": self.reward})


class ScriptedCoordinator:
    """A real ROUTER socket with real keys; the test says what it answers. One peer.

    keeps_turns: whether it answers turns, as a coordinator that keeps them all does.
    """

    def __init__(self, keys: Keys, incarnation: int = 1, keeps_turns: bool = True) -> None:
        self._channel = RouterChannel("127.0.0.1", keys.coordinator, allowed=[keys.peer.public])
        self.address = self._channel.address
        self.stamp = {"run_id": "run", "incarnation": incarnation}
        self.received: list[m.Message] = []
        self.buffers: list[list[bytes]] = []
        self._keeps_turns = keeps_turns
        self._decoder: Decoder[m.Message] = Decoder(m.ToCoordinator)
        self._peer = b""

    async def next(self, kind: type[M], timeout_s: float = 20.0) -> M:
        """Return the next message of this kind and of the start that `stamp` names.

        What comes before it is noted in `received`: other kinds, and what an earlier start's session had still to say.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            arrived = self._channel.receive(0.0)
            if arrived is None:
                await asyncio.sleep(0.002)
                continue
            self._peer, frames = arrived
            message, buffers = self._decoder.decode(frames)
            self.received.append(message)
            self.buffers.append(buffers)
            if self._keeps_turns and isinstance(message, m.TurnsDone):
                self.tell_kept(message)
            if isinstance(message, kind) and (message.run_id, message.incarnation) == tuple(self.stamp.values()):
                return message
        raise TimeoutError(f"no {kind.__name__} within {timeout_s} s, got {self.received}")

    async def welcome(self, kind: type[m.Hello] = m.Hello) -> m.Hello:
        """Take the Hello and answer it."""
        hello = await self.next(kind)
        self.send(m.Done(**self.stamp))
        return hello

    def send(self, message: m.Message, buffers: Sequence[bytes] = ()) -> None:
        assert self._channel.send(self._peer, encode(message, buffers))

    def tell_kept(self, message: m.TurnsDone, is_yours: bool = True, num_tokens: int | None = None) -> None:
        """Answer turns. num_tokens: of each sample that are kept; None: all."""
        samples = [
            m.Kept(p.group, p.sample_index, p.attempt, p.end if num_tokens is None else num_tokens, is_yours)
            for p in message.parts
        ]
        self.send(m.TurnsKept(**self.stamp, samples=samples))

    def lease(self, group: str, num_samples: int = 1, buffers: Sequence[bytes] = (), **changes: Any) -> m.Lease:
        """Send and return a lease. buffers: of the samples that it goes on with."""
        values = {
            "group": group,
            "attempt": 1,
            "kind": "train",
            "prompt": "2+2=",
            "label": "4",
            "columns": {},
            "sample_indices": list(range(num_samples)),
            "greedy_indices": [],
            "number": 1,
            "seed": 7,
        }
        lease = m.Lease(**self.stamp, **{**values, **changes})
        self.send(lease, buffers)
        return lease

    def acknowledge(self, group: str, sample_index: int, outcome: str) -> None:
        self.send(m.Ack(**self.stamp, group=group, sample_index=sample_index, outcome=outcome))  # type: ignore[arg-type]

    def close(self) -> None:
        self._channel.close(linger_s=0.0)


def make_keys() -> Keys:
    """Return new CURVE keys."""
    return Keys(KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair()))


def make_spec(address: str = "tcp://127.0.0.1:1", incarnation: int = 1, **rollout: Any) -> RunSpec:
    """Return a run with short limits; changes go into its rollout settings."""
    settings = {"max_response_tokens": 32, "max_context_tokens": 256, "max_observation_tokens": 96, **rollout}
    return RunSpec(
        run_id="run",
        incarnation=incarnation,
        coordinator_address=address,
        seed=7,
        rollout=RolloutSettings(**settings),
        retriever=RetrieverSettings(),
        rewards=RewardsSettings(),
    )
