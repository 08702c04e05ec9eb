"""The conversations of a sample, and which one a request continues. A turn of the policy is never tokenised again.

A request brings its whole history. It continues behind the last known turn of the policy in it, or branches there.

    branch 0:                              system user | turn  tool | turn
    request with all of it and a message   -> continues branch 0
    request with another tool message      -> branch 1, with the tokens of the first turn
    request with another system message    -> branch 2
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.episodes.conversation import Conversation

Unit = tuple[Any, ...]  # comparable message; its first part is the role
Wording = tuple[str, Sequence[str]]  # text of a message with its white space, and the ids of its calls


@dataclass(frozen=True)
class BranchTurn:
    """A turn of the policy in a branch."""

    num_units: int  # messages up to its end
    last_token: int  # id of its last token
    num_model_tokens: int = 0  # policy's tokens up to its end
    wording: Wording = ("", ())  # text and ids as answered


@dataclass
class Branch:
    """One conversation of a sample."""

    number: int  # index within the sample, from 0
    kind: Hashable  # tools of the chat template; a request continues conversations with the same ones
    history: Sequence[Unit]
    turns: list[BranchTurn]
    conversation: Conversation | None = None  # tokens; None: no finished turn
    is_busy: bool = False  # a turn is in progress
    num_answers: int = 0  # turns written in this branch
    num_sent_turns: int = 0  # turns up to the last sent one
    last_sent: int = 0  # number of its last answer among all sent ones; 0: none
    is_out_of_room: bool = False  # its last request left no room for a turn


@dataclass(frozen=True)
class Place:
    """Place where a request continues."""

    branch: Branch  # new or known branch
    num_turns: int  # kept turns
    source: Conversation | None
    new_from: int  # first new message


@dataclass
class Branches:
    """All conversations of a sample."""

    branches: list[Branch] = field(default_factory=list)
    num_sent: int = 0
    num_begun: int = 0  # branches so far, with refused ones
    num_changed: int = 0  # requests that hold a turn of the policy, but not as it was answered or where it was
    with_stop: dict[Unit, Unit] = field(default_factory=dict)  # turn with its stop string -> turn as answered

    def place(self, kind: Hashable, history: Sequence[Unit], wordings: Sequence[Wording]) -> Place:
        """Return where a request with this history continues, and mark its branch busy. wordings: of its messages."""
        history = self._without_stops(history)
        source, num_turns = self._longest_match(kind, history, wordings, operator.eq)
        if source is None or num_turns < len(source.turns):
            similar, num_similar = self._longest_match(kind, history, wordings, _has_no_other_text)
            if similar is not None and (source is None or num_similar > num_turns):
                source, num_turns = similar, num_similar
        num_known = source.turns[num_turns - 1].num_units if source else 0
        self.num_changed += self._has_changed_turn(kind, history, num_known)
        if source is not None and num_turns == len(source.turns) and not source.is_busy:
            source.is_busy = True
            return Place(source, num_turns, None, source.turns[-1].num_units)
        kept = source.turns[:num_turns] if source is not None else []
        known = source.history[: kept[-1].num_units] if source is not None else ()
        branch = Branch(self.num_begun, kind, known, list(kept), is_busy=True)
        self.num_begun += 1
        self.branches.append(branch)
        if source is None:
            return Place(branch, 0, None, 0)
        return Place(branch, num_turns, source.conversation, kept[-1].num_units)

    def forget(self, branch: Branch) -> None:
        """Remove a branch whose first turn was refused."""
        self.branches.remove(branch)

    def add_turn(self, branch: Branch, history: Sequence[Unit], turn: BranchTurn, with_stop: Unit | None) -> int:
        """Add a turn; return its number in the branch, from 1.

        history: the request's, with the turn. with_stop: the turn with its stop string.
        """
        branch.num_answers += 1
        if with_stop is not None:
            self.with_stop[with_stop] = history[-1]
        # Earlier turns stay as they were answered: the agent may have left out the texts of turns with calls.
        branch.history = [*branch.history, *self._without_stops(history[len(branch.history) :])]
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

    def has_turn(self, unit: Unit) -> bool:
        """Return whether a message is a turn of the policy in one of the conversations."""
        return any(branch.history[turn.num_units - 1] == unit for branch in self.branches for turn in branch.turns)

    def _without_stops(self, history: Sequence[Unit]) -> Sequence[Unit]:
        return [self.with_stop.get(unit, unit) for unit in history]

    def _has_changed_turn(self, kind: Hashable, history: Sequence[Unit], num_known: int) -> bool:
        """Return whether a turn of the policy came back in other words, behind other messages or with other tools.

        num_known: messages of the longest match.
        """
        for branch in self.branches:
            places = {turn.num_units - 1 for turn in branch.turns}
            written = {branch.history[place] for place in places}
            for place, unit in enumerate(history[num_known:], num_known):
                if unit[0] != "assistant":
                    continue
                has_same_past = place in places and history[:place] == branch.history[:place]
                # Two draws behind one history are no change: there the words and the past are equal.
                is_same = has_same_past and unit == branch.history[place] and branch.kind == kind
                if not is_same and (has_same_past or unit in written):
                    return True
        return False

    def _longest_match(
        self,
        kind: Hashable,
        history: Sequence[Unit],
        wordings: Sequence[Wording],
        is_same: Callable[[Sequence[Unit], Sequence[Unit]], bool],
    ) -> tuple[Branch | None, int]:
        """Return the branch with the most of this history up to the end of a turn, and that turn's number.

        Of branches with as much, prefer the one with the agent's own wording: two turns of one history may differ in
        white space alone. Then prefer the one that can continue as it is.
        """
        best: tuple[Branch | None, int] = (None, 0)
        best_rank = (0, 0, False)
        for branch in self.branches:
            if branch.kind != kind or branch.conversation is None:
                continue
            for number in range(len(branch.turns), 0, -1):
                num_units = branch.turns[number - 1].num_units
                if num_units < best_rank[0] or not is_same(history[:num_units], branch.history[:num_units]):
                    continue
                is_free = number == len(branch.turns) and not branch.is_busy
                rank = (num_units, _num_same(branch.turns[:number], wordings), is_free)
                if rank > best_rank:
                    best, best_rank = (branch, number), rank
                break
        return best


def _num_same(turns: Sequence[BranchTurn], wordings: Sequence[Wording]) -> int:
    """Return how many texts and ids of turns came back exactly as they were answered."""
    pairs = ((turn.wording, wordings[turn.num_units - 1]) for turn in turns)
    return sum((text == sent) + (ids == sent_ids) for (text, ids), (sent, sent_ids) in pairs)


def _has_no_other_text(history: Sequence[Unit], known: Sequence[Unit]) -> bool:
    """Return whether two histories are equal but for what the agent left out: thoughts, and texts before calls."""

    def is_same(unit: Unit, answered: Unit) -> bool:
        (role, text, *calls), whole = unit, answered[1]
        if role != "assistant" or (role, *calls) != (answered[0], *answered[2:]):
            return unit == answered
        return text in (whole, whole.rpartition("</think>")[2]) or (not text and any(calls))

    return len(history) == len(known) and all(map(is_same, history, known))
