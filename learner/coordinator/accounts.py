"""What every part of the coordinator writes to: the ledger, the outgoing messages, and counts for a status."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import msgspec

from learner.ledger.ledger import Ledger
from protocol.wire import messages as m


@dataclass
class Tally:
    """Numbers of events in this start of the run."""

    skipped: int = 0  # groups skipped
    filtered: int = 0  # groups replaced because of their mean score
    retried: int = 0  # times that samples of a group were queued for another lease
    stale: int = 0  # groups restarted because they were too old
    lost_leases: int = 0  # leases that did not reach their server
    resumed: int = 0  # samples that another server continued from their kept turns
    leased_twice: int = 0  # overdue groups that a second server got
    undeliverable: int = 0  # messages that found no connection
    refused: Counter[str] = field(default_factory=Counter)  # messages not used, by reason
    rejected: Counter[str] = field(default_factory=Counter)  # trajectories that cannot be trained, by reason
    unused: Counter[str] = field(default_factory=Counter)  # trajectories not needed, by reason
    failed: Counter[str] = field(default_factory=Counter)  # samples that a neighbour failed, by neighbour

    def counts(self) -> Counter[str]:
        """Return the numbers above zero as one table: "retried", "rejected:nonfinite" and so on."""
        counts = Counter(
            {
                "skipped": self.skipped,
                "filtered": self.filtered,
                "retried": self.retried,
                "dropped:stale": self.stale,
                "lost_leases": self.lost_leases,
                "resumed": self.resumed,
                "leased_twice": self.leased_twice,
                "undeliverable": self.undeliverable,
            }
        )
        by_key = {"refused": self.refused, "rejected": self.rejected, "unused": self.unused, "failed": self.failed}
        for name, table in by_key.items():
            counts.update({f"{name}:{key}": number for key, number in table.items()})
        return +counts


class _Stamp(TypedDict):
    run_id: str
    incarnation: int
    request: int


class Mailbox:
    """Outgoing messages, stamped with this start of the run, until the loop sends them after the ledger's commit."""

    def __init__(self, run_id: str, incarnation: int) -> None:
        self.run_id = run_id
        self.incarnation = incarnation
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
        """Tell a server the outcome of a sample."""
        ack = m.Ack(
            run_id=self.run_id,
            incarnation=self.incarnation,
            group=group,
            sample_index=sample_index,
            outcome=outcome,
            detail=detail[:2000],
        )
        self._outgoing.append((peer, ack, []))

    def confirm_turns(self, server: str, samples: list[m.KeptSample]) -> None:
        """Tell a server how many tokens of its running samples are kept."""
        self.send(server, m.TurnsKept(run_id=self.run_id, incarnation=self.incarnation, samples=samples))

    def release(self, kept: Mapping[str, list[str]]) -> None:
        """Tell servers which groups' trajectories they may drop. kept: server -> names of groups."""
        for server, names in kept.items():
            for first in range(0, len(names), m.MAX_GROUPS):
                part = names[first : first + m.MAX_GROUPS]
                self.send(server, m.GroupsTrained(run_id=self.run_id, incarnation=self.incarnation, groups=part))

    def ping(self, newest_leases: Mapping[str, int]) -> None:
        """Tell each server the number of its newest lease."""
        for server, number in newest_leases.items():
            self.send(server, m.Ping(run_id=self.run_id, incarnation=self.incarnation, newest_lease=number))

    def refuse(self, peer: str, detail: str, reason: str, request: int = 0) -> None:
        """Tell a peer that its message was not used. reason: for its program; detail: for people."""
        self.send(peer, m.Refusal(**self._stamp(request), detail=detail[:2000], reason=reason))

    def confirm(self, peer: str, request: int = 0) -> None:
        """Tell a peer that its message was received."""
        self.send(peer, m.Done(**self._stamp(request)))

    def put_off(self, peer: str, request: int, detail: str, is_for_evaluation: bool = False) -> None:
        """Tell a rank to ask again, and what is missing."""
        why = is_for_evaluation or msgspec.UNSET
        self.send(peer, m.Wait(**self._stamp(request), detail=detail[:2000], is_for_evaluation=why))

    def push_again(self, peer: str, request: int, step: int) -> None:
        """Tell a rank that no server holds the weights that its step needs."""
        self.send(peer, m.PushAgain(**self._stamp(request), step=step))

    def end(self, peer: str, request: int, step: int, detail: str) -> None:
        """Tell a rank that the run has no such step."""
        self.send(peer, m.RunEnd(**self._stamp(request), step=step, detail=detail[:2000]))

    def _stamp(self, request: int) -> _Stamp:
        return {"run_id": self.run_id, "incarnation": self.incarnation, "request": request}


@dataclass(frozen=True)
class Accounts:
    """The records of one start of the run."""

    ledger: Ledger  # states of prompts and trajectories
    mailbox: Mailbox  # messages to send
    tally: Tally  # counts for a status
