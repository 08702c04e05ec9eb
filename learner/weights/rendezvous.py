"""Rendezvous of the learner and the servers of a broadcast group: over gloo, NCCL, or on one machine."""

import itertools
import secrets
from typing import Any, Protocol

from protocol.addresses import listen
from protocol.weights.group import BroadcastGroup, GlooGroup, NcclGroup, reach_store
from protocol.weights.same_machine import SameMachineGroup, listen_here

SERVERS_PATIENCE = 2.0  # a server waits longer for a bucket than the learner, which knows who is late


class Rendezvous(Protocol):
    """One attempt to meet."""

    def init(self, place: int) -> dict[str, Any]:
        """Return the arguments for the group's server number `place`, from 0, whose workers have consecutive ranks."""
        ...

    def join(self) -> BroadcastGroup:
        """Return the group; blocks until all members have joined."""
        ...

    def close(self) -> None:
        """Free the resources of an attempt that failed."""
        ...


class GlooRendezvous:
    """Through the learner's store. Each attempt has a new key, so that a late server finds no stale entries."""

    _attempts = itertools.count()

    def __init__(self, address: str, port: int, num_servers: int, workers_per_server: int, deadline_s: float) -> None:
        self._where = (address, port, deadline_s)
        self._key = f"weights-{next(self._attempts)}"
        self._workers_per_server = workers_per_server
        self._world_size = 1 + num_servers * workers_per_server

    def init(self, place: int) -> dict[str, Any]:
        address, port, deadline_s = self._where
        rank_offset = 1 + place * self._workers_per_server
        group = {"key": self._key, "rank_offset": rank_offset, "world_size": self._world_size}
        return {"address": address, "port": port, "deadline_s": deadline_s, **group}

    def join(self) -> BroadcastGroup:
        # A new connection: torch's store client serves one blocking wait at a time, and links must not queue.
        address, _, deadline_s = self._where
        return GlooGroup(reach_store(*self._where), self._key, 0, self._world_size, address, deadline_s)

    def close(self) -> None:
        """All attempts share one store."""


class NcclRendezvous:
    """Through vLLM's rendezvous for NCCL weight transfer, on a port that is opened here."""

    def __init__(self, address: str, num_servers: int, workers_per_server: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._listener = listen(address)
        self._where = (address, int(self._listener.getsockname()[1]))
        self._world_size = 1 + num_servers * workers_per_server
        self._workers_per_server = workers_per_server

    def init(self, place: int) -> dict[str, Any]:
        address, port = self._where
        # vLLM adds only the worker's rank inside its server: without an offset, all servers would claim rank 1.
        rank_offset = 1 + place * self._workers_per_server
        return {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": self._world_size,
            "deadline_s": SERVERS_PATIENCE * self._deadline_s,
        }

    def join(self) -> BroadcastGroup:
        return NcclGroup(self._listener, self._world_size, self._deadline_s)

    def close(self) -> None:
        self._listener.close()  # a group has its own copy


class SameMachineRendezvous:
    """Through a socket of this machine with a new random name for each attempt."""

    def __init__(self, num_servers: int, workers_per_server: int, deadline_s: float) -> None:
        self._name = secrets.token_hex(16)
        self._listener = listen_here(self._name)
        self._num_workers = num_servers * workers_per_server
        self._deadline_s = deadline_s

    def init(self, place: int) -> dict[str, Any]:
        return {"name": self._name, "deadline_s": self._deadline_s}

    def join(self) -> BroadcastGroup:
        return SameMachineGroup.send(self._listener, self._num_workers, self._deadline_s)

    def close(self) -> None:
        self._listener.close()


def rendezvous(
    backend: str, where: tuple[str, int], num_servers: int, workers_per_server: int, deadline_s: float
) -> Rendezvous:
    """Return a new attempt to meet the servers. where: this machine's address and, over gloo, its store's port."""
    address, port = where
    if backend == "gloo":
        return GlooRendezvous(address, port, num_servers, workers_per_server, deadline_s)
    if backend == "ipc":
        return SameMachineRendezvous(num_servers, workers_per_server, deadline_s)
    return NcclRendezvous(address, num_servers, workers_per_server, deadline_s)
