"""A conversation as tokens while it is played: only appended to, never tokenised again.

Shape letter: T tokens so far, prompt included.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from protocol.errors import FrameError
from protocol.wire.trajectory import LOGPROBS, MASK, TOKENS, Trajectory, TrajectoryFacts, VersionSpan
from rollout.engine.generation import Generation

_encoder = msgspec.msgpack.Encoder()
_facts_decoder = msgspec.msgpack.Decoder(TrajectoryFacts)


class Transcript:
    """Tokens [T] with behaviour logprobs [T], loss mask [T] and the versions that wrote them.

    Example: a prompt of 2 tokens, a turn of 3 by version 7, an observation of 2, a turn of 1 by version 8 gives the
    mask 0 0 1 1 1 0 0 1 and the spans (2, 5, 7), (7, 8, 8).
    """

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self.tokens = list(prompt_tokens)
        self.num_prompt_tokens = len(self.tokens)
        self.num_turns = 0
        self.version_spans: list[VersionSpan] = []
        self._logprobs = [0.0] * len(self.tokens)
        self._mask = [0] * len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def response_tokens(self) -> list[int]:
        """Everything after the prompt, observations included."""
        return self.tokens[self.num_prompt_tokens :]

    def add_turn(self, generation: Generation) -> None:
        """Append what the policy wrote: the very tokens it sampled."""
        offset = len(self.tokens)
        self.num_turns += 1
        self.version_spans += [VersionSpan(offset + s, offset + e, v) for s, e, v in generation.version_spans]
        self.tokens += generation.tokens
        self._logprobs += generation.logprobs
        self._mask += [1] * len(generation.tokens)

    def add_observation(self, tokens: Sequence[int]) -> None:
        """Append what the environment said; never trained on."""
        self.tokens += tokens
        self._logprobs += [0.0] * len(tokens)
        self._mask += [0] * len(tokens)

    def to_trajectory(self, facts: TrajectoryFacts) -> Trajectory:
        """Return the finished trajectory, checked as the coordinator will check it.

        Raises: FrameError when the engine's figures cannot be trained, or the coordinator would refuse the facts: it
        could name no sample then, and the trajectory would be sent for ever.
        """
        trajectory = Trajectory(
            _readable(facts),
            tokens=np.array(self.tokens, TOKENS),
            behaviour_logprobs=np.array(self._logprobs, LOGPROBS),
            loss_mask=np.array(self._mask, MASK),
        )
        trajectory.check()
        return trajectory


def _readable(facts: TrajectoryFacts) -> TrajectoryFacts:
    """Return facts as whoever receives them reads them. Raises: FrameError naming the first field that is wrong."""
    try:
        return _facts_decoder.decode(_encoder.encode(facts))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise FrameError("$.trajectory", str(error)) from error
