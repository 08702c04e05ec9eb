"""How the learner and the servers of a broadcast group find each other, over gloo or NCCL."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

from protocol.weights.group import BroadcastGroup, GlooGroup, NcclGroup, free_port, reach_store


class Meeting(Protocol):
    """How the learner and a link's servers find each other: what the servers are told, and the learner's own half."""

    @property
    def init(self) -> dict[str, Any]: ...
    def join(self) -> BroadcastGroup: ...


class GlooMeeting:
    """Through the learner's store; each attempt has a key of its own, so that a late joiner finds nobody's leavings."""

    _attempts = itertools.count()

    def __init__(self, address: str, port: int, world_size: int, deadline_s: float) -> None:
        self._where = (address, port, deadline_s)
        self._key = f"weights-{next(self._attempts)}"
        self._world_size = world_size

    @property
    def init(self) -> dict[str, Any]:
        address, port, deadline_s = self._where
        group = {"key": self._key, "rank_offset": 1, "world_size": self._world_size}
        return {"address": address, "port": port, "deadline_s": deadline_s, **group}

    def join(self) -> BroadcastGroup:
        # A connection of its own: torch's store client serves one blocking wait at a time, and links must not queue.
        address, _, deadline_s = self._where
        return GlooGroup(reach_store(*self._where), self._key, 0, self._world_size, address, deadline_s)


class NcclMeeting:
    """Through vLLM's own rendezvous for its NCCL weight transfer; the port is free at this moment, not reserved."""

    def __init__(self, address: str, world_size: int) -> None:
        self._where = (address, free_port(address), world_size)

    @property
    def init(self) -> dict[str, Any]:
        address, port, world_size = self._where
        return {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}

    def join(self) -> BroadcastGroup:
        return NcclGroup(*self._where)
