"""Turns that servers tell of while a sample goes on: kept for the server that goes on with it when this one is gone."""

from collections.abc import Sequence

from learner.coordinator.accounts import Accounts
from learner.coordinator.groups.group import Group
from learner.coordinator.groups.open_groups import OpenGroups
from learner.coordinator.leases.leases import check_vocabulary
from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.conversation import ConversationPart, arrays_of, check_part, split_buffers


class FinishedTurns:
    """Takes turns of the server that has a sample's newest lease; any other hears that the sample is not its own."""

    def __init__(self, groups: OpenGroups, accounts: Accounts, max_tokens: int, vocab_size: int | None) -> None:
        """max_tokens: rollout.max_context_tokens. vocab_size: of the policy; None: any token is taken."""
        self._groups = groups
        self._mailbox = accounts.mailbox
        self._tally = accounts.tally
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size

    def receive(self, server: str, message: m.TurnsDone, buffers: list[bytes], versions: range) -> None:
        """Keep what continues what is kept, and tell the server how far each sample is kept by now."""
        try:
            arrays = split_buffers(message.parts, buffers, "$.parts")
        except FrameError as error:
            self._tally.refused[error.reason] += 1
            self._mailbox.refuse(server, str(error), error.reason)
            return
        self._mailbox.tell_kept(
            server, [self._kept(server, *each, versions) for each in zip(message.parts, arrays, strict=True)]
        )

    def _kept(self, server: str, part: ConversationPart, buffers: Sequence[bytes], versions: range) -> m.Kept:
        group, index = self._groups.find(part.group), part.sample_index
        num_tokens, is_yours = 0, group is not None and group.makes(index, server, part.attempt)
        if group is not None and is_yours:
            try:
                num_tokens = self._take(group, part, buffers, versions)
            except FrameError as error:
                is_yours = False
                self._reject(group, part, server, error)
        return m.Kept(part.group, index, part.attempt, num_tokens, is_yours)

    def _take(self, group: Group, part: ConversationPart, buffers: Sequence[bytes], versions: range) -> int:
        """Keep a part unless one before it was lost on the way; returns how many tokens are kept.

        Raises: FrameError for one that no trajectory could go on from.
        """
        kept = group.kept.get(part.sample_index)
        num_tokens = 0 if kept is None else kept.part.num_tokens
        if part.first_token > num_tokens:
            return num_tokens
        if part.end > self._max_tokens:
            raise FrameError("$.parts", f"has {part.end} tokens; rollout.max_context_tokens = {self._max_tokens}")
        check_part(part, buffers, "$.parts")
        check_vocabulary(arrays_of(buffers)[0], self._vocab_size)
        if (newest := max((span.version for span in part.version_spans), default=0)) > versions[-1]:
            problem = f"have version {newest}, the learner is at {versions[0]}"
            raise FrameError("$.parts.version_spans", problem, "version")
        self._groups.keep_turns(group, part, buffers)
        return part.end

    def _reject(self, group: Group, part: ConversationPart, server: str, error: FrameError) -> None:
        """Fail a sample as its trajectory would be."""
        self._tally.rejected[error.reason] += 1
        if group.is_leased(part.sample_index, server, part.attempt):
            self._groups.fail(group, [part.sample_index], server, "trajectory", f"refused: {error}")
