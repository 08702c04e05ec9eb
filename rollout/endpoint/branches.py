"""Which of a sample's conversations a request goes on with: what the policy wrote is never tokenised again.

A request brings its whole history. Where that begins with what was said in a conversation here up to a turn of the
policy, the conversation goes on behind that turn, or parts there into a second one when it has gone on otherwise.
Everything else begins a conversation of its own.

    said in branch 0:      system user | turn  tool | turn
    request, all of it and a new message            -> goes on in branch 0
    request, other words behind the first turn      -> branch 1, with the tokens of the first turn
    request, other words from the beginning         -> branch 2
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.episodes.conversation import Conversation


@dataclass(frozen=True)
class SaidTurn:
    """A turn of the policy in a branch."""

    num_said: int  # length of `said` with it
    last_token: int  # its last one
    # what its last tokens say that `said` leaves out, and a text that goes on may say: the longest first
    endings: tuple[str, ...] = ()
    num_model_tokens: int = 0  # written by the policy up to its end, in this conversation


@dataclass
class Branch:
    """One conversation of a sample."""

    number: int  # counted from 0 within the sample
    kind: Any  # chat with these tools, text or tokens: requests of one kind alone go on with each other
    said: Sequence[Any]  # messages, characters or tokens so far, as they are compared
    turns: list[SaidTurn]  # of the policy, in order
    conversation: Conversation | None = None  # its tokens; None: its first turn is still being written
    is_busy: bool = False  # True: a turn is being written
    num_answers: int = 0  # turns that were written in it
    heard_turns: int = 0  # turns up to the last that was sent to the agent
    heard: int = 0  # number of its last answer among all that were sent; 0: none yet


@dataclass(frozen=True)
class Place:
    """Where a request goes on."""

    branch: Branch  # begun with the request where nothing was said before
    num_turns: int  # turns of the policy that are kept
    parted_from: Conversation | None  # of which those turns are taken over; None: the branch's own, or no turns
    new_from: int  # what of the request is new: everything from here on


@dataclass
class Branches:
    """All conversations of a sample."""

    branches: list[Branch] = field(default_factory=list)
    num_heard: int = 0  # answers that were sent
    num_begun: int = 0  # refused ones too
    # kind -> (a turn as an agent says it that puts its stop string back -> the turn as it was answered)
    with_stop: dict[Any, dict[Any, Any]] = field(default_factory=dict)

    def place(self, kind: Any, asked: Sequence[Any]) -> Place:
        """Return where a request goes on; its branch is busy from here on. asked: what it says, as `Branch.said`."""
        found, num_turns = self._longest(kind, self._as_answered(kind, asked))
        if found is not None and num_turns == len(found.turns) and not found.is_busy:
            found.is_busy = True
            return Place(found, num_turns, None, found.turns[-1].num_said)
        kept = found.turns[:num_turns] if found is not None else []
        said = found.said[: kept[-1].num_said] if found is not None else ()
        branch = Branch(self.num_begun, kind, said, list(kept), is_busy=True)
        self.num_begun += 1
        self.branches.append(branch)
        if found is None:
            return Place(branch, 0, None, 0)
        return Place(branch, num_turns, found.conversation, kept[-1].num_said)

    def forget(self, branch: Branch) -> None:
        """Take out a branch whose first turn of its own was refused."""
        self.branches.remove(branch)

    def answered(self, branch: Branch, said: Sequence[Any], turn: SaidTurn, with_stop: Any | None) -> int:
        """Note a turn that the policy wrote; returns its number in the branch.

        said: the request and the turn. with_stop: the turn as an agent says it that puts its stop string back.
        """
        branch.num_answers += 1
        if with_stop is not None:
            self.with_stop.setdefault(branch.kind, {})[with_stop] = said[-1]
        branch.said = self._as_answered(branch.kind, said)
        branch.turns.append(turn)
        return len(branch.turns)

    def hear(self, branch: Branch, turn: int) -> None:
        """Note that a turn is sent to the agent. turn: its number in the branch, counted from 1."""
        if turn > branch.heard_turns:
            self.num_heard += 1
            branch.heard, branch.heard_turns = self.num_heard, turn

    def trained(self, rule: str) -> Branch | None:
        """Return the branch to train, by agents.trained_conversation; None when the agent was sent no turn.

        What it gave up waiting for is no part of what it gives a reward to.
        """

        def rank(branch: Branch) -> int:
            return branch.turns[branch.heard_turns - 1].num_model_tokens if rule == "longest" else branch.heard

        return max((branch for branch in self.branches if branch.heard), key=rank, default=None)

    def _as_answered(self, kind: Any, said: Sequence[Any]) -> Sequence[Any]:
        same = self.with_stop.get(kind)
        return said if same is None else [same.get(each, each) for each in said]

    def _longest(self, kind: Any, asked: Sequence[Any]) -> tuple[Branch | None, int]:
        """Return the branch and the number of its turns that the request begins with: the most that there are."""
        best: tuple[Branch | None, int] = (None, 0)
        best_said = 0
        for branch in self.branches:
            if branch.kind != kind or branch.conversation is None:
                continue
            for number in range(len(branch.turns), 0, -1):
                turn, num_said = branch.turns[number - 1], branch.turns[number - 1].num_said
                # A request that ends with the turn has the policy write on behind it, unless that has ended a text.
                is_longer = num_said < len(asked) + (not turn.endings)
                if num_said < best_said or not is_longer or asked[num_said - 1] != branch.said[num_said - 1]:
                    continue
                if asked[:num_said] == branch.said[:num_said]:
                    # Of two that say the same, the one that can go on as it is.
                    is_free = number == len(branch.turns) and not branch.is_busy
                    if num_said > best_said or is_free:
                        best, best_said = (branch, number), num_said
                    break
        return best
