"""The conversations of a sample, and which one a request continues. A turn of the policy is never tokenised again.

A request brings its whole history. If it begins with a known conversation up to a turn of the policy, it continues
behind that turn; if the conversation continued in another way, it branches there. Any other request begins a
conversation.

    branch 0:                              system user | turn  tool | turn
    request with all of it and a message   -> continues branch 0
    request with another tool message      -> branch 1, with the tokens of the first turn
    request with another system message    -> branch 2
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.episodes.conversation import Conversation


@dataclass(frozen=True)
class BranchTurn:
    """A turn of the policy in a branch."""

    num_units: int  # units of the history up to the end of the turn
    last_token: int  # id of its last token
    # texts of its last tokens that the history leaves out and a continuation may include, the longest first
    endings: tuple[str, ...] = ()
    num_model_tokens: int = 0  # policy's tokens in the conversation up to its end


@dataclass
class Branch:
    """One conversation of a sample."""

    number: int  # index within the sample, from 0
    kind: Any  # chat with these tools, text or tokens; a request continues branches of its own kind only
    history: Sequence[Any]  # messages, characters or tokens so far, in a comparable form
    turns: list[BranchTurn]  # policy's turns, in order
    conversation: Conversation | None = None  # its tokens; None: the first turn is not finished
    is_busy: bool = False  # True: a turn is in progress
    num_answers: int = 0  # turns that the policy wrote in this branch
    num_sent_turns: int = 0  # turns up to the last one that the agent got
    last_sent: int = 0  # number of its last answer among all sent ones; 0: none was sent


@dataclass(frozen=True)
class Place:
    """Place in a sample's conversations where a request continues."""

    branch: Branch  # branch of the request, new or known
    num_turns: int  # turns of the policy that are kept
    source: Conversation | None  # conversation to copy those turns from; None: the branch's own, or no turns
    new_from: int  # first new unit of the request


@dataclass
class Branches:
    """All conversations of a sample."""

    branches: list[Branch] = field(default_factory=list)
    num_sent: int = 0  # answers that were sent
    num_begun: int = 0  # branches so far, with refused ones
    # kind -> (turn with its stop string put back by the agent -> turn as it was answered)
    with_stop: dict[Any, dict[Any, Any]] = field(default_factory=dict)

    def place(self, kind: Any, history: Sequence[Any]) -> Place:
        """Return the place where a request with this history continues. Its branch is busy from now on."""
        found, num_turns = self._longest(kind, self._without_stops(kind, history))
        if found is not None and num_turns == len(found.turns) and not found.is_busy:
            found.is_busy = True
            return Place(found, num_turns, None, found.turns[-1].num_units)
        kept = found.turns[:num_turns] if found is not None else []
        known = found.history[: kept[-1].num_units] if found is not None else ()
        branch = Branch(self.num_begun, kind, known, list(kept), is_busy=True)
        self.num_begun += 1
        self.branches.append(branch)
        if found is None:
            return Place(branch, 0, None, 0)
        return Place(branch, num_turns, found.conversation, kept[-1].num_units)

    def forget(self, branch: Branch) -> None:
        """Remove a branch after the refusal of its first own turn."""
        self.branches.remove(branch)

    def add_turn(self, branch: Branch, history: Sequence[Any], turn: BranchTurn, with_stop: Any | None) -> int:
        """Add a turn of the policy; return its number in the branch, from 1.

        history: the request's, with the turn. with_stop: the turn with its stop string put back by the agent.
        """
        branch.num_answers += 1
        if with_stop is not None:
            self.with_stop.setdefault(branch.kind, {})[with_stop] = history[-1]
        branch.history = self._without_stops(branch.kind, history)
        branch.turns.append(turn)
        return len(branch.turns)

    def mark_sent(self, branch: Branch, turn: int) -> None:
        """Record that the agent got a turn. turn: its number in the branch, from 1."""
        if turn > branch.num_sent_turns:
            self.num_sent += 1
            branch.last_sent, branch.num_sent_turns = self.num_sent, turn

    def branch_to_train(self, rule: str) -> Branch | None:
        """Return the branch to train, by agents.trained_conversation; None when the agent got no turn.

        Turns that the agent never got have no part in its reward.
        """

        def rank(branch: Branch) -> int:
            return branch.turns[branch.num_sent_turns - 1].num_model_tokens if rule == "longest" else branch.last_sent

        return max((branch for branch in self.branches if branch.last_sent), key=rank, default=None)

    def _without_stops(self, kind: Any, history: Sequence[Any]) -> Sequence[Any]:
        same = self.with_stop.get(kind)
        return history if same is None else [same.get(each, each) for each in history]

    def _longest(self, kind: Any, history: Sequence[Any]) -> tuple[Branch | None, int]:
        """Return the branch and the number of its turns that the history begins with: the longest match."""
        best: tuple[Branch | None, int] = (None, 0)
        best_units = 0
        for branch in self.branches:
            if branch.kind != kind or branch.conversation is None:
                continue
            for number in range(len(branch.turns), 0, -1):
                turn, num_units = branch.turns[number - 1], branch.turns[number - 1].num_units
                # A history that ends with the turn continues behind it, unless the turn has ended a text.
                is_longer = num_units < len(history) + (not turn.endings)
                if num_units < best_units or not is_longer or history[num_units - 1] != branch.history[num_units - 1]:
                    continue
                if history[:num_units] == branch.history[:num_units]:
                    # Of two equal matches, take the branch that can continue as it is.
                    is_free = number == len(branch.turns) and not branch.is_busy
                    if num_units > best_units or is_free:
                        best, best_units = (branch, number), num_units
                    break
        return best
