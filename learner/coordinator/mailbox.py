"""What the coordinator has to say: messages stamped with this start of the run, kept until the loop sends them."""

from collections.abc import Mapping
from typing import TypedDict

import msgspec

from protocol.wire import messages as m


class _Stamp(TypedDict):
    run_id: str
    incarnation: int
    request: int


class Mailbox:
    """The outgoing post of one start of a run."""

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
        """Tell a server what became of a sample."""
        self.send(
            peer,
            m.Ack(
                run_id=self.run_id,
                incarnation=self.incarnation,
                group=group,
                sample_index=sample_index,
                outcome=outcome,
                detail=detail[:2000],
            ),
        )

    def tell_kept(self, server: str, samples: list[m.Kept]) -> None:
        """Tell a server how much of its samples' turns is kept."""
        self.send(server, m.TurnsKept(run_id=self.run_id, incarnation=self.incarnation, samples=samples))

    def release(self, kept: Mapping[str, list[str]]) -> None:
        """Tell servers which groups' trajectories they need not keep any longer. kept: server -> names of groups."""
        for server, names in kept.items():
            for first in range(0, len(names), m.MAX_GROUPS):
                part = names[first : first + m.MAX_GROUPS]
                self.send(server, m.Trained(run_id=self.run_id, incarnation=self.incarnation, groups=part))

    def ping(self, newest_leases: Mapping[str, int]) -> None:
        """Tell servers the number of the last lease that each was sent."""
        for server, number in newest_leases.items():
            self.send(server, m.Ping(run_id=self.run_id, incarnation=self.incarnation, newest_lease=number))

    def refuse(self, peer: str, detail: str, reason: str, request: int = 0) -> None:
        """Tell a peer that its message was not used. reason: for its program; detail: for people."""
        self.send(peer, m.Refused(**self._stamp(request), detail=detail[:2000], reason=reason))

    def confirm(self, peer: str, request: int = 0) -> None:
        """Tell a peer that what it told was taken in."""
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
        self.send(peer, m.Ended(**self._stamp(request), step=step, detail=detail[:2000]))

    def _stamp(self, request: int) -> _Stamp:
        return {"run_id": self.run_id, "incarnation": self.incarnation, "request": request}
