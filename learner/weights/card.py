"""A rank's end of pushes on shared devices: each rank hands every bucket to the server worker on its own card.

Rank 0 directs the push as over other ways (`learner.weights.push`): it calls the servers, and each worker compares rank
0's digest with what came from its own rank. Rank 0 also names the servers that are ready to the other ranks. A worker
that does not take a bucket within the deadline is dropped; its server then fails and joins again.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from learner.weights.feed import BucketMemory, device_of, pack
from learner.weights.rendezvous import SERVERS_PATIENCE
from protocol.weights.group import PeerLostError
from protocol.weights.same_machine import SameMachineGroup, card_address, listen_here
from protocol.weights.wire import Bucket


class OwnCard:
    """The server workers that joined on this rank's card, one for each server."""

    def __init__(
        self, name: str, rank: int, deadline_s: float, share: Callable[[Sequence[str]], Sequence[str]]
    ) -> None:
        """name: of the run's cards, the same on every rank. share: returns rank 0's value on every rank; collective."""
        self.name = name
        self.share = share
        self.deadline_s = deadline_s
        self._workers: dict[str, SameMachineGroup] = {}
        self._listener = listen_here(card_address(name, rank))
        threading.Thread(target=self._admit, name="weight-card", daemon=True).start()

    def worker(self, server: str) -> SameMachineGroup | None:
        """Return the connection to the server's worker on this card; None when it has none here."""
        return self._workers.get(server)

    def pass_on(self, plan: Sequence[Bucket], gathered: Iterator[Iterable[tuple[str, Tensor]]]) -> None:
        """Hand a push's buckets to the workers on this card. For every rank but 0. gathered: as for `feed.pack`."""
        groups: list[CardGroup] | None = None
        memory = BucketMemory(plan, device_of("ipc"))
        for flat in pack(plan, gathered, memory):
            if groups is None:
                groups = [CardGroup(self, server) for server in self.share([])]
            for group in list(groups):
                try:
                    group.broadcast(flat)
                except PeerLostError:  # its server reports it to rank 0
                    group.close()
                    groups.remove(group)
            memory.give_back(flat)

    def close(self) -> None:
        """Have the thread close all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)

    def _admit(self) -> None:
        with self._listener, contextlib.suppress(OSError):  # closed
            while True:
                server, worker = SameMachineGroup.admit(self._listener, self.deadline_s)
                if (earlier := self._workers.get(server)) is not None:
                    earlier.close()
                self._workers[server] = worker
                worker.welcome()
        for worker in self._workers.values():
            worker.close()


class CardGroup:
    """A rank and a server's worker on its card, if the server has one there."""

    def __init__(self, card: OwnCard, server: str) -> None:
        self.device = device_of("ipc")
        self._card, self._server = card, server
        self._worker: SameMachineGroup | None = None  # the first push's: a closed group never meets a later connection

    def broadcast(self, flat: Tensor) -> None:
        """Raises: PeerLostError."""
        if (worker := self._worker or self._card.worker(self._server)) is not None:
            self._worker = worker
            worker.broadcast(flat)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class CardRendezvous:
    """One server's attempt to meet: each of its workers joins the rank on its card before the server's call returns."""

    def __init__(self, card: OwnCard, server: str, first_worker: int) -> None:
        """first_worker: the number of the server's first worker among all; on CPUs the number of its rank."""
        self._card, self._server, self._first_worker = card, server, first_worker

    def init(self, place: int) -> dict[str, Any]:
        # While a rank waits for a late worker, the workers of the other ranks wait for the next bucket.
        meet = {"name": self._card.name, "deadline_s": SERVERS_PATIENCE * self._card.deadline_s}
        return {**meet, "server": self._server, "first_worker": self._first_worker}

    def join(self) -> CardGroup:
        return CardGroup(self._card, self._server)

    def close(self) -> None:
        """All attempts share the card's socket."""
