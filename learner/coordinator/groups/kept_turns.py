"""Finished turns of running samples: when a server dies, the next server continues from them.

They are in this process's memory only: 9 bytes a token of at most rollout.max_context_tokens for each sample of an open
group. The next start of the run begins these samples again.
"""

from collections.abc import Mapping, Sequence

import msgspec

from learner.coordinator.accounts import Accounts
from learner.coordinator.groups.group import DIED, Group
from learner.coordinator.groups.open_groups import OpenGroups
from learner.data.window import StalenessWindow
from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.conversation import ConversationPart, check_part, split_buffers
from protocol.wire.trajectory import ITEM_BYTES, arrays_of, check_vocabulary

# Limits of one lease: raw frames below 64 MiB each, a header far below a megabyte and 65,536 values.
_MAX_TOKENS = 1 << 23
_MAX_HEADER_BYTES = 1 << 18
_MAX_ENTRIES = 8192


class FinishedTurns:
    """The turns of one sample, as one part with its three arrays."""

    def __init__(self, part: ConversationPart, buffers: Sequence[bytes]) -> None:
        """part: begins with the first token."""
        self.part = part
        self.arrays = [bytearray(buffer) for buffer in buffers]  # tokens, logprobs and mask

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.part.version_spans)

    @property
    def num_model_tokens(self) -> int:
        return sum(span.end - span.start for span in self.part.version_spans)

    def add(self, part: ConversationPart, buffers: Sequence[bytes]) -> None:
        """Append a part at its first token; later tokens of the earlier parts are replaced."""
        first, before = part.first_token, self.part
        for array, size, buffer in zip(self.arrays, ITEM_BYTES, buffers, strict=True):
            array[first * size :] = buffer
        self.part = msgspec.structs.replace(
            part,
            first_token=0,
            num_tokens=part.end,
            version_spans=[*(span for span in before.version_spans if span.end <= first), *part.version_spans],
            turns=[*(turn for turn in before.turns if turn.end <= first), *part.turns],
        )


class KeptTurns:
    """Takes turns only from the server with a sample's newest lease; any other server hears that it has lost it."""

    def __init__(
        self, groups: OpenGroups, window: StalenessWindow, accounts: Accounts, max_tokens: int, vocab_size: int | None
    ) -> None:
        """max_tokens: rollout.max_context_tokens. vocab_size: the policy's; None: any token is accepted."""
        self._kept: dict[str, dict[int, FinishedTurns]] = {}  # group's name -> sample -> its turns
        self._groups = groups
        self._window = window
        self._mailbox = accounts.mailbox
        self._counts = accounts.counts
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        groups.on_failed.append(self._on_failed)
        groups.on_closed.append(self._on_closed)

    def resume(self, group: Group, version: int) -> list[FinishedTurns]:
        """Return the kept turns of missing samples that fit into one lease to a server with weights of `version`.

        Turns that are too old to train on those weights are dropped.
        """
        kept = self._kept.get(group.name, {})
        for index in list(kept):
            if group.kind == "train" and self._window.is_too_old(kept[index].oldest_version, version):
                turns = kept.pop(index)
                self._groups.waste(group.name, index, turns.part.attempt, "stale", turns.num_model_tokens)
        return fitting({index: kept[index] for index in group.missing if index in kept})

    def receive(self, server: str, message: m.TurnsDone, buffers: list[bytes], versions: range) -> None:
        """Keep the turns that continue the kept ones, and tell the server how many tokens of each sample are kept."""
        try:
            arrays = split_buffers(message.parts, buffers, "$.parts")
        except FrameError as error:
            self._counts[f"refused:{error.reason}"] += 1
            self._mailbox.refuse(server, str(error), error.reason)
            return
        self._mailbox.confirm_turns(
            server, [self._take(server, *each, versions) for each in zip(message.parts, arrays, strict=True)]
        )

    def _take(self, server: str, part: ConversationPart, buffers: Sequence[bytes], versions: range) -> m.KeptSample:
        group, index = self._groups.find(part.group), part.sample_index
        num_tokens, is_yours = 0, group is not None and _is_newest_lease(group, index, server, part.attempt)
        if group is not None and is_yours:
            try:
                num_tokens = self._keep(group, part, buffers, versions)
            except FrameError as error:
                is_yours = False
                self._counts[f"rejected:{error.reason}"] += 1
                if group.is_leased(index, server, part.attempt):
                    self._groups.fail(group, {index: part.attempt}, server, "trajectory", f"refused: {error}")
        return m.KeptSample(part.group, index, part.attempt, num_tokens, is_yours)

    def _keep(self, group: Group, part: ConversationPart, buffers: Sequence[bytes], versions: range) -> int:
        """Keep a part unless an earlier one was lost on the way; returns the number of kept tokens.

        Raises: FrameError for a part that no trajectory could continue.
        """
        kept = self._kept.setdefault(group.name, {})
        for index in [index for index in kept if index in group.trajectories]:
            del kept[index]
        turns = kept.get(part.sample_index)
        num_tokens = 0 if turns is None else turns.part.num_tokens
        if part.first_token > num_tokens:
            return num_tokens
        if part.end > self._max_tokens:
            raise FrameError("$.parts", f"has {part.end} tokens; rollout.max_context_tokens = {self._max_tokens}")
        check_part(part, buffers, "$.parts")
        check_vocabulary(arrays_of(buffers)[0], self._vocab_size)
        if (newest := max((span.version for span in part.version_spans), default=0)) > versions[-1]:
            problem = f"have version {newest}, the learner is at {versions[0]}"
            raise FrameError("$.parts.version_spans", problem, "version")
        if turns is None:
            kept[part.sample_index] = FinishedTurns(part, buffers)
        else:
            turns.add(part, buffers)
        return part.end

    def _on_failed(self, group: Group, index: int, boundary: str) -> int:
        """Drop the turns of a failed sample, which may be the cause. A server's death says nothing about them."""
        turns = None if boundary == DIED else self._kept.get(group.name, {}).pop(index, None)
        return 0 if turns is None else turns.num_model_tokens

    def _on_closed(self, group: Group, waste: str | None) -> None:
        for index, turns in self._kept.pop(group.name, {}).items():
            if waste is not None and group.kind == "train" and index not in group.trajectories:
                self._groups.waste(group.name, index, turns.part.attempt, waste, turns.num_model_tokens)


def _is_newest_lease(group: Group, index: int, server: str, attempt: int) -> bool:
    """Return whether a server has the newest lease of a sample that is not back."""
    is_newest = group.attempts.get(index) == attempt and group.holders.get(index, server) == server
    return is_newest and index not in group.trajectories


def fitting(kept: Mapping[int, FinishedTurns]) -> list[FinishedTurns]:
    """Return the first turns that have room in one lease together."""
    chosen: list[FinishedTurns] = []
    num_tokens = num_bytes = num_entries = 0
    for turns in kept.values():
        part = turns.part
        num_tokens += part.num_tokens
        num_bytes += len(msgspec.msgpack.encode(part))
        num_entries += part.num_entries
        if num_tokens > _MAX_TOKENS or num_bytes > _MAX_HEADER_BYTES or num_entries > _MAX_ENTRIES:
            break
        chosen.append(turns)
    return chosen


def joined_buffers(kept: Sequence[FinishedTurns]) -> list[bytes]:
    """Return the concatenated arrays of several samples, as a lease carries them; empty for no samples."""
    return [b"".join(turns.arrays[place] for turns in kept) for place in range(3)] if kept else []
