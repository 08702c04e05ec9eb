"""What every part of the coordinator writes to: ledger, outgoing messages, counts, and failures in a row."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import msgspec

from learner.ledger.ledger import Ledger
from protocol.http.bodies import CUT_TEXTS, FOREIGN_MARKS
from protocol.wire import messages as m

_NUM_NAMED_AT_FIRST, _NUM_NAMED_LATER = 2, 16
_NUM_FATAL = 32
_NOTICES = {  # by the end of the log that calls for it
    "environment/changed_turns": (
        "An agent sent a turn of the policy back in other words, as smolagents does, with other tools, or behind other "
        "messages, such as a trimmed history or another system message: turns before the change are not trained. The "
        "curve environment/changed_turns counts them."
    ),
    "environment/dropped_conversations": (
        "An agent had several conversations in a sample, as DSPy does, which begins one for each turn: only one is "
        "trained (agents.trained_conversation). The curve environment/dropped_conversations counts the others."
    ),
    f"/{FOREIGN_MARKS}": (
        "A reward model reads marks of the policy's chat template as plain text: its own template is another one, and "
        "its rewards may mean little. Use one of the policy's family, or a function that writes its template "
        "(docs/do/rewards.md)."
    ),
    f"/{CUT_TEXTS}": (
        "A text was longer than a reward model reads: its reward is of the end alone, without prompt or beginning. Use "
        "a model with more positions, or lower rollout.max_context_tokens."
    ),
}


class FailureStreaks:
    """Counts failures since the last sample that came back. The run names them, and ends for a line that keeps raising.

    A service that is down fails many samples and comes back. A line of code that raises for 32 samples in a row will
    raise for all others.
    """

    def __init__(self) -> None:
        self.notices: list[str] = []  # sentences for the operator, at most one for each boundary
        self.give_up_reason: str | None = None  # why the run has to end
        self._num_accepted = 0  # samples that came back before the newest failure
        self._num_failed: Counter[str] = Counter()  # boundary -> failures in a row
        self._num_raised: Counter[tuple[str, str]] = Counter()  # (boundary, place) -> failures in a row
        self._named: set[str] = set()

    def note_logs(self, logs: Mapping[str, float]) -> None:
        """Record what an accepted sample's logs report; the operator reads each notice once."""
        for log in (log for log, value in logs.items() if value):
            for end, notice in _NOTICES.items():
                if log.endswith(end):
                    self.note(notice)

    def note(self, notice: str) -> None:
        """Give the operator a sentence, once."""
        if notice not in self.notices:
            self.notices.append(notice)

    def add(self, boundary: str, detail: str, place: str, num_accepted: int) -> None:
        """Record a failed sample.

        place: file and line of the user's code that raised; empty: no such code did. num_accepted: samples that came
        back in this start.
        """
        if num_accepted > self._num_accepted:
            self._num_accepted = num_accepted
            self._num_failed.clear()
            self._num_raised.clear()
        self._num_failed[boundary] += 1
        num, num_named = self._num_failed[boundary], _NUM_NAMED_LATER if num_accepted else _NUM_NAMED_AT_FIRST
        if num >= num_named and boundary not in self._named:
            self._named.add(boundary)
            self.notices.append(f"{boundary} failed for {num} samples in a row: {detail}")
        if not place:
            return
        self._num_raised[boundary, place] += 1
        if self._num_raised[boundary, place] >= _NUM_FATAL and self.give_up_reason is None:
            self.give_up_reason = (
                f"{boundary} failed for {_NUM_FATAL} samples in a row at {place}: {detail[:1000]}. "
                "Repair the code, and start the run again."
            )


class _Start(TypedDict):
    run_id: str
    incarnation: int


class Mailbox:
    """Outgoing messages, stamped with this start of the run, until the loop sends them after the ledger's commit."""

    def __init__(self, run_id: str, incarnation: int) -> None:
        self.run_id = run_id
        self.incarnation = incarnation
        self._start: _Start = {"run_id": run_id, "incarnation": incarnation}
        self._outgoing: list[tuple[str, m.Message, list[bytes]]] = []

    def is_ours(self, message: m.Message) -> bool:
        """False for a message of another run, or of another start of this one."""
        return (message.run_id, message.incarnation) == (self.run_id, self.incarnation)

    def take(self) -> list[tuple[str, m.Message, list[bytes]]]:
        """Return (peer, message, buffers) in the order they were written, and forget them."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def send(self, peer: str, message: m.Message, buffers: list[bytes] | None = None) -> None:
        self._outgoing.append((peer, message, buffers or []))

    def acknowledge(self, peer: str, group: str, sample_index: int, outcome: m.Outcome, detail: str = "") -> None:
        ack = m.Ack(**self._start, group=group, sample_index=sample_index, outcome=outcome, detail=detail[:2000])
        self._outgoing.append((peer, ack, []))

    def confirm_turns(self, server: str, samples: list[m.KeptSample]) -> None:
        """Send the numbers of kept tokens."""
        self.send(server, m.TurnsKept(**self._start, samples=samples))

    def release(self, kept: Mapping[str, list[str]]) -> None:
        """Tell servers which groups' trajectories they may drop. kept: server -> names of groups."""
        for server, names in kept.items():
            for first in range(0, len(names), m.MAX_GROUPS):
                self.send(server, m.GroupsTrained(**self._start, groups=names[first : first + m.MAX_GROUPS]))

    def ping(self, newest_leases: Mapping[str, int]) -> None:
        for server, number in newest_leases.items():
            self.send(server, m.Ping(**self._start, newest_lease=number))

    def refuse(self, peer: str, detail: str, reason: str, request: int = 0) -> None:
        """Tell a peer that its message was not used. reason: for its program; detail: for people."""
        self.send(peer, m.Refusal(**self._start, request=request, detail=detail[:2000], reason=reason))

    def confirm(self, peer: str, request: int = 0) -> None:
        self.send(peer, m.Done(**self._start, request=request))

    def put_off(self, peer: str, request: int, detail: str, is_for_evaluation: bool = False) -> None:
        """Tell a rank to ask again, and what is missing."""
        why = is_for_evaluation or msgspec.UNSET
        self.send(peer, m.Wait(**self._start, request=request, detail=detail[:2000], is_for_evaluation=why))

    def push_again(self, peer: str, request: int, step: int) -> None:
        """Tell a rank that no server holds the weights that its step needs."""
        self.send(peer, m.PushAgain(**self._start, request=request, step=step))

    def end(self, peer: str, request: int, step: int, detail: str) -> None:
        """Tell a rank that the run has no such step."""
        self.send(peer, m.RunEnd(**self._start, request=request, step=step, detail=detail[:2000]))


@dataclass(frozen=True)
class Accounts:
    """The records of one start of the run.

    counts: numbers of events in this start, as a status shows them:

        skipped, filtered, retried   groups skipped, replaced for their mean score, or queued for another lease
        dropped:stale, leased_twice  groups restarted because they were too old; overdue groups leased again
        resumed, lost_leases         samples continued from their kept turns; leases that did not reach their server
        undeliverable, refused:WHY   messages that found no connection, and messages that were not used
        rejected:WHY, unused:WHY     trajectories that cannot be trained, and trajectories that were not needed
        failed:NEIGHBOUR             samples that a neighbour of a server failed
    """

    ledger: Ledger
    mailbox: Mailbox
    counts: Counter[str] = field(default_factory=Counter)
    streaks: FailureStreaks = field(default_factory=FailureStreaks)  # failures while no sample succeeds
