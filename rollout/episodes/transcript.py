"""A conversation as tokens: only appended to, never tokenised again.

A transcript is plain data. It can be sent (MessagePack, JSON) and continued on another engine.
Shape letter: T tokens so far, prompt included.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from protocol.errors import FrameError
from protocol.wire.conversation import ConversationPart, FinishedTurn
from protocol.wire.trajectory import (
    LOGPROBS,
    MASK,
    MAX_CALLS,
    TOKENS,
    TimedCall,
    Trajectory,
    TrajectoryFacts,
    TurnReward,
    VersionSpan,
    arrays_of,
)
from rollout.engine.generation import Generation

_MAX_ANSWER = 200
_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = "\\boxed{"
_HASHES = "####"
_encoder = msgspec.msgpack.Encoder()
_facts_decoder = msgspec.msgpack.Decoder(TrajectoryFacts)


class Transcript(msgspec.Struct):
    """The conversation so far.

    Example: a prompt of 2 tokens, a turn of 3 by version 7, an observation of 2, a turn of 1 by version 8 gives the
    mask 0 0 1 1 1 0 0 1 and the spans (2, 5, 7), (7, 8, 8).
    """

    tokens: list[int]  # [T]
    num_prompt_tokens: int
    logprobs: list[float]  # [T] natural log at the sampling temperature; 0 where the mask is 0
    loss_mask: list[int]  # [T] 1 where the policy wrote the token
    version_spans: list[VersionSpan] = []  # policy versions of the policy's tokens, in order
    turns: list[FinishedTurn] = []
    reward: float | None = None  # environment's reward so far; None: none yet
    turn_rewards: list[TurnReward] = []  # environment's rewards by turn, in order, without zeros
    score: float | None = None  # environment's score, for filtering; None: it gave none
    content_hashes: list[str] = []  # hashes of the indexes that answered its searches, sorted
    logs: dict[str, float] = {}  # environment's numbers for curves, by name
    started_at: float = 0.0  # Unix seconds
    generate_s: float = 0.0  # with waits for weights
    environment_s: float = 0.0

    @classmethod
    def begin(cls, prompt_tokens: Sequence[int]) -> "Transcript":
        """Return the transcript of a prompt."""
        n = len(prompt_tokens)
        return cls(list(prompt_tokens), n, logprobs=[0.0] * n, loss_mask=[0] * n, started_at=time.time())

    @classmethod
    def of_part(cls, part: ConversationPart, buffers: Sequence[bytes]) -> "Transcript":
        """Return the transcript of a part that begins with the first token. buffers: tokens, logprobs, mask."""
        tokens, logprobs, mask = arrays_of(buffers)
        return cls(
            tokens.tolist(),
            part.num_prompt_tokens,
            logprobs.tolist(),
            mask.tolist(),
            list(part.version_spans),
            list(part.turns),
            part.reward,
            list(part.turn_rewards),
            part.score,
            list(part.content_hashes),
            dict(part.logs),
            part.started_at,
            part.generate_s,
            part.environment_s,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt_tokens(self) -> list[int]:
        """Tokens of the prompt."""
        return self.tokens[: self.num_prompt_tokens]

    @property
    def num_model_tokens(self) -> int:
        """Number of the policy's tokens."""
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def response_tokens(self) -> list[int]:
        """Everything after the prompt, observations included."""
        return self.tokens[self.num_prompt_tokens :]

    def add_turn(self, generation: Generation, started_at: float) -> None:
        """Append the policy's sampled tokens. started_at: Unix seconds."""
        offset = len(self.tokens)
        self.version_spans += [VersionSpan(offset + s, offset + e, v) for s, e, v in generation.version_spans]
        self.tokens += generation.tokens
        self.logprobs += generation.logprobs
        self.loss_mask += [1] * len(generation.tokens)
        finish: Literal["stop", "length"] = "length" if generation.finish_reason == "length" else "stop"
        num = len(generation.tokens)
        call = TimedCall("turn", finish, started_at, time.time(), num_input=offset, num_output=num)
        self.turns.append(FinishedTurn(offset, offset + num, finish, generation.stop_string))
        self.add_calls([call])

    def add_calls(self, calls: Sequence[TimedCall]) -> None:
        """Append calls of the last turn or of the reply to it, as long as the conversation has fewer than MAX_CALLS."""
        room = MAX_CALLS - sum(len(turn.calls) for turn in self.turns)
        last = self.turns[-1]
        self.turns[-1] = msgspec.structs.replace(last, calls=[*last.calls, *calls[:room]])

    def add_observation(self, tokens: Sequence[int]) -> None:
        """Append a reply to the policy; it is never trained."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.loss_mask += [0] * len(tokens)

    def add_reward(self, reward: float | None) -> None:
        """Add the environment's reward for the last turn."""
        if reward is not None:
            self.reward = (self.reward or 0.0) + reward
        if reward and self.turns:
            end, before = self.turns[-1].end, self.turn_rewards
            if before and before[-1].end == end:
                before, reward = before[:-1], before[-1].reward + reward
            self.turn_rewards = [*before, TurnReward(end, reward)]

    def add_figures(self, score: float | None, logs: Mapping[str, float]) -> None:
        """Set the environment's score and logs; the last value of each counts."""
        self.score = self.score if score is None else score
        self.logs = {**self.logs, **logs}

    def buffers(self, first: int, end: int) -> list[bytes]:
        """Return tokens, logprobs and mask of the tokens [first, end) as raw little-endian bytes."""
        arrays = ((self.tokens, TOKENS), (self.logprobs, LOGPROBS), (self.loss_mask, MASK))
        return [np.array(values[first:end], kind).tobytes() for values, kind in arrays]

    def up_to(self, num_turns: int) -> "Transcript":
        """Return a copy up to the end of the policy's num_turns-th turn."""
        end = self.turns[num_turns - 1].end
        return msgspec.structs.replace(
            self,
            tokens=self.tokens[:end],
            logprobs=self.logprobs[:end],
            loss_mask=self.loss_mask[:end],
            version_spans=[span for span in self.version_spans if span.end <= end],
            turns=self.turns[:num_turns],
            turn_rewards=[turn for turn in self.turn_rewards if turn.end <= end],
            content_hashes=list(self.content_hashes),
            logs=dict(self.logs),
        )

    def to_trajectory(self, facts: TrajectoryFacts) -> Trajectory:
        """Return the finished trajectory, with the coordinator's own checks.

        Raises: FrameError for numbers that cannot be trained, and for facts that the coordinator could not decode: it
        could not name the sample then, and the trajectory would be resent for ever.
        """
        trajectory = Trajectory(
            _reencode(facts),
            tokens=np.array(self.tokens, TOKENS),
            behaviour_logprobs=np.array(self.logprobs, LOGPROBS),
            loss_mask=np.array(self.loss_mask, MASK),
        )
        trajectory.check()
        return trajectory


def _reencode(facts: TrajectoryFacts) -> TrajectoryFacts:
    """Return the facts after encoding and decoding. Raises: FrameError naming the first wrong field."""
    try:
        return _facts_decoder.decode(_encoder.encode(facts))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise FrameError("$.trajectory", str(error)) from error


def final_answer(text: str) -> str:
    """Return a message's last `<answer>`, `\\boxed{}` or `####` answer, or else its last line; "" for a blank text.

    Answers of samples are compared by it. Case and spaces do not count; at most 200 characters.
    Example: "It is <answer> Paris </answer>" gives "paris".
    """
    found = _tagged_answer(text) or _boxed_answer(text) or _after_hashes(text) or _last_line(text)
    return " ".join(found.casefold().split())[:_MAX_ANSWER].strip()


def _tagged_answer(text: str) -> str:
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end] if start >= 0 else ""


def _boxed_answer(text: str) -> str:
    """Return the contents of the last box, with braces inside it."""
    start = text.rfind(_BOX)
    depth, begin = 1, start + len(_BOX)
    for place in range(begin, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place]
    return ""


def _after_hashes(text: str) -> str:
    start = text.rfind(_HASHES)
    return _last_line(text[start + len(_HASHES) :].strip().partition("\n")[0]) if start >= 0 else ""


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
