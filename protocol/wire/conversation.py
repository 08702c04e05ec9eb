"""A running conversation as tokens and facts, from which another server can continue.

It goes to the coordinator in parts, and to the next server as one part.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from protocol.errors import FrameError
from protocol.wire.trajectory import (
    ITEM_BYTES,
    MAX_CALLS,
    Count,
    Name,
    Seconds,
    TimedCall,
    TrajectoryFacts,
    TurnReward,
    VersionSpan,
    arrays_of,
    check_arrays,
    check_spans,
)

MAX_SNAPSHOT_CHARACTERS = 1 << 14
MAX_TURNS = 4096
LARGEST_NUMBER = 1e18
_Number = Annotated[float, msgspec.Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]


class FinishedTurn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A turn of the policy: tokens [start, end) of its conversation."""

    start: Count  # place of its first token
    end: Count  # place after its last token
    finish: Literal["stop", "length"]  # stop: end of text or a stop string; length: a token limit
    # stop string that ended it
    stop_string: Annotated[str, msgspec.Meta(max_length=1 << 20)] | None
    # the turn itself, then the environment's and tools' part of the reply
    calls: Annotated[list[TimedCall], msgspec.Meta(max_length=MAX_CALLS)] = msgspec.field(default_factory=list)


class ConversationPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Turns of one conversation, each with its reply. Tokens, logprobs and mask are raw frames."""

    group: Name
    sample_index: Count
    attempt: Count  # number of its lease among the group's
    first_token: Count = 0  # place of its first token in the conversation
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # in this part
    num_prompt_tokens: Count  # tokens of the conversation before the first turn
    # spans of exactly the policy's tokens, by places in the conversation, in order
    version_spans: Annotated[list[VersionSpan], msgspec.Meta(max_length=MAX_TURNS)]
    # turns of the policy, in order
    turns: Annotated[list[FinishedTurn], msgspec.Meta(min_length=1, max_length=MAX_TURNS)]
    # state of the environment after the last turn, as JSON
    snapshot: Annotated[str, msgspec.Meta(max_length=MAX_SNAPSHOT_CHARACTERS)]
    # The other fields are about the whole conversation; those without a comment are as in TrajectoryFacts.
    started_at: Seconds  # Unix seconds by the first server's clock
    generate_s: Seconds
    environment_s: Seconds
    reward: _Number | None = None  # environment's reward; None: none yet
    # parts of that reward by turn, in order
    turn_rewards: Annotated[list[TurnReward], msgspec.Meta(max_length=MAX_TURNS)] = msgspec.field(default_factory=list)
    score: _Number | None = None  # environment's score, for filtering; None: none
    # numbers for curves, by name
    logs: Annotated[dict[Name, _Number], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    content_hashes: Annotated[list[Name], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=list)

    @property
    def end(self) -> int:
        """Place after its last token in the conversation."""
        return self.first_token + self.num_tokens

    @property
    def num_entries(self) -> int:
        """Number of its version spans and turns, with two for each call: a message limits it."""
        return len(self.version_spans) + sum(1 + 2 * len(turn.calls) for turn in self.turns)


def split_buffers(
    parts: Sequence[ConversationPart | TrajectoryFacts], buffers: Sequence[bytes], path: str
) -> list[list[bytes]]:
    """Return the tokens, logprobs and mask of each part from three concatenated frames.

    Raises: FrameError "length" when a frame's length is not that of the parts.
    """
    num_tokens = sum(part.num_tokens for part in parts)
    if [len(buffer) for buffer in buffers] != [num_tokens * size for size in ITEM_BYTES]:
        sizes = ", ".join(str(len(buffer)) for buffer in buffers)
        raise FrameError(path, f"has buffers of {sizes} bytes for {num_tokens} tokens", "length")
    split, first = [], 0
    for part in parts:
        end = first + part.num_tokens
        split.append([buffer[first * size : end * size] for buffer, size in zip(buffers, ITEM_BYTES, strict=True)])
        first = end
    return split


def check_part(part: ConversationPart, buffers: Sequence[bytes], path: str) -> None:
    """Raise FrameError for a part that no trajectory could continue. buffers: its arrays, of the right lengths."""
    tokens, logprobs, mask = arrays_of(buffers)
    check_spans(part.version_spans, mask, path, part.first_token)
    check_arrays(tokens, logprobs, mask, path)
    end = max(part.first_token, part.num_prompt_tokens)
    for i, turn in enumerate(part.turns):
        if not end <= turn.start < turn.end <= part.end:
            raise FrameError(f"{path}.turns[{i}]", f"is [{turn.start}, {turn.end}) after {end}, of {part.end} tokens")
        end = turn.end
