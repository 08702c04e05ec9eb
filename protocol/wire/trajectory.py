"""The transport unit: one finished conversation as tokens and facts.

Shape letter: T tokens of the trajectory, prompt included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.errors import FrameError

MAX_NAME = 200
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
# The bounds exclude NaN, which would be NULL in the ledger and crash the coordinator.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Finish = Literal["answer", "stop", "length", "turns", "context", "time"]
CallKind = Literal["turn", "environment", "tool", "reward"]
MAX_CALLS = 1024

TOKENS = np.dtype("<i4")
LOGPROBS = np.dtype("<f4")
MASK = np.dtype("u1")
# gc=False: a structure that cannot be in a cycle. A collection of the coordinator's garbage would walk every trajectory
# that is out, for 0.1 s at 40,000.
_ARRAYS = ("tokens", "behaviour_logprobs", "loss_mask")
ITEM_BYTES = (TOKENS.itemsize, LOGPROBS.itemsize, MASK.itemsize)
# Squares of larger rewards are infinite in float32.
_LARGEST_REWARD = 1e18


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Tokens [start, end) of the trajectory were written by this policy version."""

    start: Count  # place of its first token, prompt included
    end: Count  # place after its last token
    version: Count


_START, _END, _VERSION = attrgetter("start"), attrgetter("end"), attrgetter("version")


class TurnReward(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A part of the reward that the environment gave for one turn."""

    end: Count  # place after the turn's last token
    reward: float  # part of the trajectory's reward


class TimedCall(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A part of the time that a sample took, in Unix seconds by the clock of the server that spent it."""

    kind: CallKind  # environment: its answer to a turn, with the tools that it called
    name: Name  # of a tool or reward endpoint; of a turn the reason of its end
    started_at: Seconds
    finished_at: Seconds
    num_attempts: Count = 0  # HTTP requests, retries included; those of the whole batch if a batch was split
    num_input: Count = 0  # tokens before a turn
    num_output: Count = 0  # tokens of a turn


class TrajectoryFacts(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, gc=False
):
    """Everything about a trajectory but its tokens."""

    group: Name  # e{epoch}-{prompt uid}, or eval-{step}-{prompt uid}
    sample_index: Count  # in its group, from 0
    attempt: Count  # number of its lease in the group, from 1
    incarnation: Count  # start of the run that sent the lease; a later one may train the trajectory
    kind: Literal["train", "eval"]  # eval: never trained
    is_greedy: bool  # each token was the likeliest
    server: Name
    num_tokens: Count  # T: prompt, turns and replies
    num_prompt_tokens: Count  # tokens before the first turn
    num_turns: Count
    # "answer": the environment got its answer. "stop": end of text or a stop string. "length": max_response_tokens of a
    # turn. "turns": max_turns, or the environment's end. "context": max_context_tokens. "time": max_conversation_s
    finish: Finish
    reward: float  # reward services' reward by rewards.combine, plus the environment's
    # measured parts by the endpoint's name, or "environment"
    reward_parts: Annotated[dict[Name, float], msgspec.Meta(max_length=64)]
    # environment's rewards for turns before the last, in order
    turn_rewards: Annotated[list[TurnReward], msgspec.Meta(max_length=4096)] = msgspec.field(default_factory=list)
    # mean of the reward services' `scores`, for filtering; None: the reward counts
    reward_score: float | None = None
    # numbers for curves, by endpoint/name: the `extra_logs` of reward services
    reward_logs: Annotated[dict[Name, float], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    # spans in order, of exactly the policy's tokens
    version_spans: Annotated[list[VersionSpan], msgspec.Meta(min_length=1, max_length=4096)]
    started_at: Seconds  # Unix seconds by the server's clock: before the environment gave the prompt
    finished_at: Seconds  # Unix seconds by the server's clock: after the reward came
    generate_s: Seconds  # seconds in the engine, waits for weights included
    environment_s: Seconds  # seconds in the environment, searches included
    reward_s: Seconds
    # hashes of the indexes that answered its searches; empty: no searches, or no hashes
    content_hashes: Annotated[list[Name], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=list)
    # turns, environment, tools and rewards, the first MAX_CALLS of them
    calls: Annotated[list[TimedCall], msgspec.Meta(max_length=MAX_CALLS)] = msgspec.field(default_factory=list)
    # final answer of an evaluation's sample, in the form that is compared; empty: no answer; absent: not extracted
    answer: Annotated[str, msgspec.Meta(max_length=200)] | msgspec.UnsetType = msgspec.UNSET

    @property
    def oldest_version(self) -> int:
        """Oldest version of the policy's tokens: staleness counts from it."""
        spans = self.version_spans
        return spans[0].version if len(spans) == 1 else int(min(map(_VERSION, spans)))

    @property
    def newest_version(self) -> int:
        """Newest version of the policy's tokens."""
        spans = self.version_spans
        return spans[0].version if len(spans) == 1 else int(max(map(_VERSION, spans)))

    @property
    def num_model_tokens(self) -> int:
        """Number of the policy's tokens."""
        spans = self.version_spans
        return (
            spans[0].end - spans[0].start if len(spans) == 1 else int(sum(map(_END, spans)) - sum(map(_START, spans)))
        )


_facts_decoder = msgspec.msgpack.Decoder(list[TrajectoryFacts])


@dataclass(frozen=True)
class Trajectory:
    """Facts and arrays of one trajectory."""

    facts: TrajectoryFacts
    tokens: NDArray[np.int32]  # [T] prompt, turns and replies
    # [T] natural logarithm, by the sampling engine at its temperature; 0 where loss_mask is 0
    behaviour_logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.uint8]  # [T] 1 for the policy's tokens, else 0

    def to_buffers(self) -> list[bytes]:
        """Return the arrays as raw little-endian bytes, in the order of `from_buffers`."""
        return [
            self.tokens.astype(TOKENS, copy=False).tobytes(),
            self.behaviour_logprobs.astype(LOGPROBS, copy=False).tobytes(),
            self.loss_mask.astype(MASK, copy=False).tobytes(),
        ]

    @classmethod
    def from_buffers(cls, facts: TrajectoryFacts, buffers: list[bytes], path: str = "$.trajectory") -> "Trajectory":
        """Return the checked trajectory of facts and three raw buffers. Copies nothing.

        Raises: FrameError naming the field, for a wrong length, a token below 0, a mask value other than 0 and 1, a
        logprob or reward that is not finite or out of range, a logprob where the mask is 0, no model token, or version
        spans that are not exactly the model's tokens.
        """
        if len(buffers) != 3:
            raise FrameError(path, f"has {len(buffers)} buffers, expected tokens, logprobs and mask")
        n = facts.num_tokens
        for name, size, buffer in zip(_ARRAYS, ITEM_BYTES, buffers, strict=True):
            expected = n * size
            if len(buffer) != expected:
                problem = f"has {len(buffer)} bytes, expected {expected} for {n} tokens"
                raise FrameError(f"{path}.{name}", problem, "length")
        trajectory = cls(facts, *arrays_of(buffers))
        trajectory.check(path)
        return trajectory

    def check(self, path: str = "$.trajectory") -> None:
        """Raise FrameError when the arrays and facts contradict each other or hold a value that cannot be trained."""
        facts, mask = self.facts, self.loss_mask
        if not 0 < facts.num_prompt_tokens < facts.num_tokens:
            raise FrameError(f"{path}.num_prompt_tokens", f"is {facts.num_prompt_tokens} of {facts.num_tokens} tokens")
        if mask[: facts.num_prompt_tokens].any():
            raise FrameError(f"{path}.loss_mask", "is 1 inside the prompt")
        check_spans(facts.version_spans, mask, path)
        check_arrays(self.tokens, self.behaviour_logprobs, mask, path)
        self._check_rewards(path)

    def _check_rewards(self, path: str) -> None:
        numbers = {"reward": self.facts.reward, **self.facts.reward_parts, **self.facts.reward_logs}
        score = self.facts.reward_score
        for name, value in (*numbers.items(), *([("reward_score", score)] if score is not None else [])):
            if not math.isfinite(value):
                raise FrameError(f"{path}.reward", f"{name} is {value}", "nonfinite")
            if abs(value) > _LARGEST_REWARD:
                raise FrameError(f"{path}.reward", f"{name} is {value}, expected at most {_LARGEST_REWARD} either way")
        before = 0
        for i, turn in enumerate(self.facts.turn_rewards):
            if not before < turn.end <= self.facts.num_tokens or not self.loss_mask[turn.end - 1]:
                problem = f"ends at {turn.end} after {before}, where the model wrote no token"
                raise FrameError(f"{path}.turn_rewards[{i}]", problem)
            if not abs(turn.reward) <= _LARGEST_REWARD:  # NaN neither
                raise FrameError(f"{path}.turn_rewards[{i}]", f"is {turn.reward}", "nonfinite")
            before = turn.end


def arrays_of(buffers: Sequence[bytes]) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]:
    """Return the tokens, logprobs and mask in three raw frames. Copies nothing."""
    tokens, logprobs, mask = buffers
    return np.frombuffer(tokens, TOKENS), np.frombuffer(logprobs, LOGPROBS), np.frombuffer(mask, MASK)


def encode_facts(facts: Sequence[TrajectoryFacts]) -> bytes:
    """Return one frame with the facts of many trajectories."""
    return msgspec.msgpack.encode(facts)


def decode_facts(frame: bytes) -> list[TrajectoryFacts]:
    """Return the facts of `encode_facts`. Raises: FrameError."""
    try:
        return _facts_decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError("$.facts", f"cannot be read: {error}") from None


def join_arrays(trajectories: Sequence[Trajectory]) -> list[bytes]:
    """Return three frames, the arrays of the trajectories one after the other; none without trajectories."""
    if not trajectories:
        return []
    # A join of bytes takes a third of np.concatenate's time.
    return [
        b"".join([trajectory.tokens.astype(TOKENS, copy=False).data for trajectory in trajectories]),
        b"".join([trajectory.behaviour_logprobs.astype(LOGPROBS, copy=False).data for trajectory in trajectories]),
        b"".join([trajectory.loss_mask.astype(MASK, copy=False).data for trajectory in trajectories]),
    ]


def check_spans(spans: Sequence[VersionSpan], mask: NDArray[np.uint8], path: str, first: int = 0) -> None:
    """Raise FrameError unless version spans cover exactly a loss mask, whose first token is at place `first`."""
    covered = bytearray(len(mask))
    end, num_tokens = first, first + len(mask)
    for i, span in enumerate(spans):
        if not end <= span.start < span.end <= num_tokens:
            problem = f"is [{span.start}, {span.end}) after {end}, of {num_tokens} tokens"
            raise FrameError(f"{path}.version_spans[{i}]", problem)
        end = span.end
        covered[span.start - first : end - first] = b"\1" * (end - span.start)
    if covered == mask.tobytes():
        return
    if (highest := int(mask.max())) > 1:
        raise FrameError(f"{path}.loss_mask", f"holds {highest}, expected 0 or 1")
    raise FrameError(f"{path}.version_spans", "do not cover exactly the tokens the model wrote")


def check_arrays(tokens: NDArray[np.int32], logprobs: NDArray[np.float32], mask: NDArray[np.uint8], path: str) -> None:
    """Raise FrameError for tokens or logprobs that cannot be trained. Each array has at least one value."""
    if (lowest := int(tokens.min())) < 0:
        raise FrameError(f"{path}.tokens", f"holds the token {lowest}, expected 0 or more", "vocabulary")
    lowest_logprob, highest_logprob = float(logprobs.min()), float(logprobs.max())  # both NaN if any value is
    if not (math.isfinite(lowest_logprob) and math.isfinite(highest_logprob)):
        raise FrameError(f"{path}.behaviour_logprobs", "holds a value that is not finite", "nonfinite")
    if highest_logprob > 1e-3:
        raise FrameError(f"{path}.behaviour_logprobs", f"holds {highest_logprob}, above 0")
    if ((logprobs != 0) > mask).any():
        raise FrameError(f"{path}.behaviour_logprobs", "is not 0 for a token that the model did not write")


def check_vocabulary(tokens: NDArray[np.int32], vocab_size: int | None) -> None:
    """Raise FrameError for a token outside the policy's vocabulary; None: any token is accepted.

    Its embedding would crash the rank, on a GPU with "device-side assert triggered".
    """
    if vocab_size is not None and (highest := int(tokens.max())) >= vocab_size:
        problem = f"holds the token {highest}, the policy's vocabulary has {vocab_size}"
        raise FrameError("$.facts.tokens", problem, "vocabulary")
