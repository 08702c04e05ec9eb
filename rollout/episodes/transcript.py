"""A conversation as tokens while it is played: only appended to, never tokenised again.

A transcript is plain data. It can be sent (MessagePack, JSON) and taken up by another conversation, on another engine.
Shape letter: T tokens so far, prompt included.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from protocol.errors import FrameError
from protocol.wire.conversation import ConversationPart, FinishedTurn, arrays_of
from protocol.wire.trajectory import LOGPROBS, MASK, TOKENS, Trajectory, TrajectoryFacts, TurnReward, VersionSpan
from rollout.engine.generation import Generation

_encoder = msgspec.msgpack.Encoder()
_facts_decoder = msgspec.msgpack.Decoder(TrajectoryFacts)


class Transcript(msgspec.Struct):
    """What was said so far.

    Example: a prompt of 2 tokens, a turn of 3 by version 7, an observation of 2, a turn of 1 by version 8 gives the
    mask 0 0 1 1 1 0 0 1 and the spans (2, 5, 7), (7, 8, 8).
    """

    tokens: list[int]  # [T]
    num_prompt_tokens: int  # first tokens, which the policy read before its first turn
    logprobs: list[float]  # [T] natural log at the sampling temperature; 0 where the mask is 0
    loss_mask: list[int]  # [T] 1 where the policy wrote the token
    version_spans: list[VersionSpan] = []  # which policy version wrote which of the policy's tokens, in order
    turns: list[FinishedTurn] = []  # that the policy has written, in order
    reward: float | None = None  # what the environment has given; None: nothing yet
    turn_rewards: list[TurnReward] = []  # what of it was given for which turn, in order; zeros are left out
    score: float | None = None  # the environment's own, for filtering; None: it gave none
    content_hashes: list[str] = []  # of the indexes that answered its searches, sorted
    logs: dict[str, float] = {}  # the environment's numbers for curves, by name
    started_at: float = 0.0  # Unix seconds
    generate_s: float = 0.0  # seconds that turns took, waiting for weights included
    environment_s: float = 0.0  # seconds that the environment took

    @classmethod
    def begin(cls, prompt_tokens: Sequence[int]) -> "Transcript":
        """Return the transcript that holds a prompt alone."""
        n = len(prompt_tokens)
        return cls(list(prompt_tokens), n, logprobs=[0.0] * n, loss_mask=[0] * n, started_at=time.time())

    @classmethod
    def of_part(cls, part: ConversationPart, buffers: Sequence[bytes]) -> "Transcript":
        """Return the transcript that a part from the first token on is. buffers: its tokens, logprobs and mask."""
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
        """What the policy read before its first turn."""
        return self.tokens[: self.num_prompt_tokens]

    @property
    def num_model_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def response_tokens(self) -> list[int]:
        """Everything after the prompt, observations included."""
        return self.tokens[self.num_prompt_tokens :]

    def add_turn(self, generation: Generation) -> None:
        """Append what the policy wrote: the very tokens it sampled."""
        offset = len(self.tokens)
        self.version_spans += [VersionSpan(offset + s, offset + e, v) for s, e, v in generation.version_spans]
        self.tokens += generation.tokens
        self.logprobs += generation.logprobs
        self.loss_mask += [1] * len(generation.tokens)
        finish: Literal["stop", "length"] = "length" if generation.finish_reason == "length" else "stop"
        self.turns.append(FinishedTurn(offset, len(self.tokens), finish, generation.stop_string))

    def add_observation(self, tokens: Sequence[int]) -> None:
        """Append what the environment said; never trained on."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.loss_mask += [0] * len(tokens)

    def add_reward(self, reward: float | None) -> None:
        """Add what the environment gave for the last turn."""
        if reward is not None:
            self.reward = (self.reward or 0.0) + reward
        if reward and self.turns:
            end, before = self.turns[-1].end, self.turn_rewards
            if before and before[-1].end == end:
                before, reward = before[:-1], before[-1].reward + reward
            self.turn_rewards = [*before, TurnReward(end, reward)]

    def add_figures(self, score: float | None, logs: Mapping[str, float]) -> None:
        """Take over what the environment says beside the reward; the last of each counts."""
        self.score = self.score if score is None else score
        self.logs = {**self.logs, **logs}

    def buffers(self, first: int, end: int) -> list[bytes]:
        """Return tokens, logprobs and mask of the tokens [first, end) as raw little-endian bytes."""
        arrays = ((self.tokens, TOKENS), (self.logprobs, LOGPROBS), (self.loss_mask, MASK))
        return [np.array(values[first:end], kind).tobytes() for values, kind in arrays]

    def up_to(self, num_turns: int) -> "Transcript":
        """Return a copy that ends with the policy's num_turns-th turn: what came after it was never said."""
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
        """Return the finished trajectory, checked as the coordinator will check it.

        Raises: FrameError when the engine's figures cannot be trained, or the coordinator would refuse the facts: it
        could name no sample then, and the trajectory would be sent for ever.
        """
        trajectory = Trajectory(
            _readable(facts),
            tokens=np.array(self.tokens, TOKENS),
            behaviour_logprobs=np.array(self.logprobs, LOGPROBS),
            loss_mask=np.array(self.loss_mask, MASK),
        )
        trajectory.check()
        return trajectory


def _readable(facts: TrajectoryFacts) -> TrajectoryFacts:
    """Return facts as whoever receives them reads them. Raises: FrameError naming the first field that is wrong."""
    try:
        return _facts_decoder.decode(_encoder.encode(facts))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise FrameError("$.trajectory", str(error)) from error
