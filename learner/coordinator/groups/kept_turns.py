"""Finished turns of a sample that is not back: what the next server goes on from when the one that makes it is gone.

They are in this process's memory alone, and only of samples that are out: never more bytes than the same samples have
when they are back, which the staleness window bounds.
"""

from collections.abc import Mapping, Sequence

import msgspec

from protocol.wire.conversation import ConversationPart

# Of what one lease carries: its raw frames stay below 64 MiB each, its header far below a megabyte and 65,536 values.
_MAX_TOKENS = 1 << 23
_MAX_HEADER_BYTES = 1 << 18
_MAX_ENTRIES = 8192
_ITEM_BYTES = (4, 4, 1)


class KeptTurns:
    """One sample's, as one part with its three arrays."""

    def __init__(self, part: ConversationPart, buffers: Sequence[bytes]) -> None:
        """part: begins with the first token."""
        self.part = part
        self._arrays = [bytearray(buffer) for buffer in buffers]

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the policy's tokens."""
        return min(span.version for span in self.part.version_spans)

    @property
    def num_model_tokens(self) -> int:
        return sum(span.end - span.start for span in self.part.version_spans)

    def add(self, part: ConversationPart, buffers: Sequence[bytes]) -> None:
        """Put a part behind what is there up to its first token; what is there from that token on is replaced."""
        first, before = part.first_token, self.part
        for array, size, buffer in zip(self._arrays, _ITEM_BYTES, buffers, strict=True):
            array[first * size :] = buffer
        self.part = msgspec.structs.replace(
            part,
            first_token=0,
            num_tokens=part.end,
            version_spans=[*(span for span in before.version_spans if span.end <= first), *part.version_spans],
            turns=[*(turn for turn in before.turns if turn.end <= first), *part.turns],
        )

    def array(self, place: int) -> bytearray:
        """Return its tokens, logprobs or mask: place 0, 1 or 2."""
        return self._arrays[place]


def fitting(kept: Mapping[int, KeptTurns]) -> list[int]:
    """Return those samples whose turns have room in one lease together, in order."""
    chosen: list[int] = []
    num_tokens = num_bytes = num_entries = 0
    for index, turns in kept.items():
        part = turns.part
        num_tokens += part.num_tokens
        num_bytes += len(msgspec.msgpack.encode(part))
        num_entries += len(part.turns) + len(part.version_spans)
        if num_tokens > _MAX_TOKENS or num_bytes > _MAX_HEADER_BYTES or num_entries > _MAX_ENTRIES:
            break
        chosen.append(index)
    return chosen


def joined_buffers(kept: Sequence[KeptTurns]) -> list[bytes]:
    """Return the arrays of several samples behind each other, as a lease carries them; none of no samples."""
    return [b"".join(turns.array(place) for turns in kept) for place in range(3)] if kept else []
