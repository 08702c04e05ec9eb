"""The conversations of a sample, and which one a request continues. A turn of the policy is never tokenised again.

A request brings its whole history. It continues behind the last known turn of the policy in it, or branches there if
the conversation continued in another way. Any other request begins a conversation.

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

    num_units: int  # history units up to its end
    last_token: int  # id of its last token
    # ending texts outside the history that a continuation may include, longest first
    endings: tuple[str, ...] = ()
    num_model_tokens: int = 0  # policy's tokens up to its end


@dataclass
class Branch:
    """One conversation of a sample."""

    number: int  # index within the sample, from 0
    kind: Any  # chat with its tools, text or tokens; a request continues its own kind
    history: Sequence[Any]  # comparable messages, characters or tokens so far
    turns: list[BranchTurn]  # policy's turns
    conversation: Conversation | None = None  # tokens; None: no finished turn
    is_busy: bool = False  # True: a turn is in progress
    num_answers: int = 0  # turns written in this branch
    num_sent_turns: int = 0  # turns up to the last sent one
    last_sent: int = 0  # number of its last answer among all sent ones; 0: none


@dataclass(frozen=True)
class Place:
    """Place where a request continues."""

    branch: Branch  # new or known branch
    num_turns: int  # kept turns
    source: Conversation | None  # source of those turns; None: the branch's own, or no turns
    new_from: int  # first new unit


@dataclass
class Branches:
    """All conversations of a sample."""

    branches: list[Branch] = field(default_factory=list)
    num_sent: int = 0  # sent answers
    num_begun: int = 0  # branches so far, with refused ones
    # kind -> (turn with its stop string -> turn as answered)
    with_stop: dict[Any, dict[Any, Any]] = field(default_factory=dict)

    def place(self, kind: Any, history: Sequence[Any]) -> Place:
        """Return where a request with this history continues, and mark its branch busy."""
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
        """Remove a branch whose first turn was refused."""
        self.branches.remove(branch)

    def add_turn(self, branch: Branch, history: Sequence[Any], turn: BranchTurn, with_stop: Any | None) -> int:
        """Add a turn; return its number in the branch, from 1.

        history: the request's, with the turn. with_stop: the turn with its stop string.
        """
        branch.num_answers += 1
        if with_stop is not None:
            self.with_stop.setdefault(branch.kind, {})[with_stop] = history[-1]
        branch.history = self._without_stops(branch.kind, history)
        branch.turns.append(turn)
        return len(branch.turns)

    def mark_sent(self, branch: Branch, turn: int) -> None:
        """Record that the agent got this turn, numbered from 1."""
        if turn > branch.num_sent_turns:
            self.num_sent += 1
            branch.last_sent, branch.num_sent_turns = self.num_sent, turn

    def branch_to_train(self, rule: str) -> Branch | None:
        """Return the branch to train, by its sent turns; None without any. rule: agents.trained_conversation."""

        def rank(branch: Branch) -> int:
            return branch.turns[branch.num_sent_turns - 1].num_model_tokens if rule == "longest" else branch.last_sent

        return max((branch for branch in self.branches if branch.last_sent), key=rank, default=None)

    def _without_stops(self, kind: Any, history: Sequence[Any]) -> Sequence[Any]:
        same = self.with_stop.get(kind)
        return history if same is None else [same.get(each, each) for each in history]

    def _longest(self, kind: Any, history: Sequence[Any]) -> tuple[Branch | None, int]:
        """Return the branch and its number of turns of the longest match."""
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
                    # Prefer the branch that can continue as it is.
                    is_free = number == len(branch.turns) and not branch.is_busy
                    if num_units > best_units or is_free:
                        best, best_units = (branch, number), num_units
                    break
        return best
