"""The rollout servers as their messages describe them, and which one is leased to next."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from learner.live.status import ServerStatus
from protocol.wire import messages as m

# A broken connection is tried again after 0.1 to 2 s.
_RECONNECT_S = 4.0


@dataclass
class Server:
    """A rollout server by its latest messages."""

    is_here: bool = False  # it sent a message since it was last lost
    newest_lease: int = 0  # number of the last lease that it was sent
    unheard: deque[int] = field(default_factory=deque)  # numbers of leases that its last demand does not count
    unreachable_since: float | None = None  # time of the first message that found no connection, monotonic seconds
    policy_version: int | None = None  # version of its weights; None: they are not synced
    num_wanted: int = 0  # groups that it has room for
    num_leased: int = 0  # groups that it has, with leases on their way
    heartbeat: m.Heartbeat | None = None
    demand: m.Demand | None = None  # its last one


class Servers:
    """Servers by name, each known from its first message on."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}
        self._num_running = self._num_outside = 0  # sums over heartbeats: samples in an engine, and outside
        # (versions, the places in the order of the servers that may be leased to); None: a server has changed
        self._order: tuple[range, list[tuple[int, int, str]]] | None = None

    def note(self, name: str) -> Server:
        """Record that a server sent a message; returns its state, a new one for a new server."""
        server = self._servers.get(name) or self._servers.setdefault(name, Server())
        server.is_here, server.unreachable_since = True, None
        return server

    def note_unreachable(self, name: str, now: float) -> bool:
        """Record that a server has no connection; True when that has lasted so long that it will not come back.

        A process that ended closed its connections. A busy server, or one behind a slow link, keeps them.
        """
        server = self._servers.get(name)
        if server is None or not server.is_here:
            return False
        if server.unreachable_since is None:
            server.unreachable_since = now
        return now - server.unreachable_since >= _RECONNECT_S

    def newest_leases(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Return the number of the newest lease of each present server, or of those among `names`."""
        servers = [(name, self._servers[name]) for name in (self._servers if names is None else names)]
        return {name: server.newest_lease for name, server in servers if server.is_here}

    def note_hello(self, name: str, message: m.Hello) -> None:
        server = self.note(name)
        self._update(server, server.num_wanted, server.num_leased, message.policy_version)

    def note_demand(self, name: str, message: m.Demand) -> bool:
        """Record a server's room, less the leases on their way; False when the message repeats its last one."""
        server = self.note(name)
        while server.unheard and server.unheard[0] <= message.heard_of_lease:
            server.unheard.popleft()
        num_unheard = len(server.unheard)
        num_wanted, num_leased = max(0, message.num_groups - num_unheard), len(message.leases) + num_unheard
        self._update(server, num_wanted, num_leased, message.policy_version)
        is_new, server.demand = message != server.demand, message
        return is_new

    def note_heartbeat(self, name: str, message: m.Heartbeat) -> None:
        server = self.note(name)
        server.heartbeat = message
        self._update(server, server.num_wanted, server.num_leased, message.policy_version)
        self._num_running += message.num_running
        self._num_outside += message.num_waiting

    def take_outside_share(self) -> dict[str, float]:
        """Return the share of samples outside the engines over the heartbeats since the last call."""
        num_running, num_outside = self._num_running, self._num_outside
        self._num_running = self._num_outside = 0
        total = num_running + num_outside
        return {"perf/outside_share": num_outside / total} if total else {}

    def forget_state(self, name: str) -> None:
        """Record that a server was lost or restarted: its weights are unknown and it has room for nothing."""
        server = self._servers.setdefault(name, Server())
        server.is_here, server.demand = False, None
        server.unheard.clear()
        self._update(server, 0, 0, None)

    def next_to_lease(self, versions: range, other_than: Set[str] = frozenset()) -> str | None:
        """Return the server with the fewest groups among those with room and weights of one of these versions.

        Of two with as many groups it is the one with more room. Room alone would starve a server: one that has learned
        that its samples wait for rewards names four times the room of a new one, and gets the whole staleness window.
        """
        if self._order is None or self._order[0] != versions:
            able = [(name, server) for name, server in self._servers.items() if server.policy_version in versions]
            self._order = versions, sorted(_place(name, server) for name, server in able if server.num_wanted > 0)
        return next((name for *_, name in self._order[1] if name not in other_than), None)

    def able(self, versions: range) -> set[str]:
        """Return the servers with weights of one of these versions, busy ones too."""
        return {name for name, server in self._servers.items() if server.policy_version in versions}

    def reserve_slot(self, name: str, number: int) -> int:
        """Use a server's room for the lease of this number; returns the version of its weights."""
        server = self._servers[name]
        assert server.policy_version is not None
        if self._order is not None:
            order, before = self._order[1], _place(name, server)
            if (index := bisect_left(order, before)) < len(order) and order[index] == before:
                del order[index]
                if server.num_wanted > 1:
                    insort(order, (server.num_leased + 1, 1 - server.num_wanted, name))
        server.num_wanted -= 1
        server.num_leased += 1
        server.newest_lease = number
        server.unheard.append(number)
        return server.policy_version

    def absent(self) -> list[str]:
        """Return the servers that were lost: dead, or without a connection."""
        return sorted(name for name, server in self._servers.items() if not server.is_here)

    def all_lack_weights(self, versions: range) -> bool:
        """Return whether servers are present and all lack weights of these versions: nothing can be leased."""
        is_any_here = False
        for server in self._servers.values():
            if server.is_here and server.policy_version in versions:
                return False
            is_any_here = is_any_here or server.is_here
        return is_any_here

    def _update(self, server: Server, num_wanted: int, num_leased: int, policy_version: int | None) -> None:
        new = num_wanted, num_leased, policy_version
        if (server.num_wanted, server.num_leased, server.policy_version) != new:
            server.num_wanted, server.num_leased, server.policy_version = new
            self._order = None

    def status(self) -> dict[str, ServerStatus | None]:
        """Return each server's state for a live view; None before its first heartbeat."""
        return {name: _status_of(server.heartbeat) for name, server in self._servers.items()}


def _place(name: str, server: Server) -> tuple[int, int, str]:
    """Return a server's place in the order of those that are leased to next."""
    return server.num_leased, -server.num_wanted, name


def _status_of(heartbeat: m.Heartbeat | None) -> ServerStatus | None:
    if heartbeat is None:
        return None
    return ServerStatus(
        policy_version=heartbeat.policy_version,
        running=heartbeat.num_running,
        waiting=heartbeat.num_waiting,
        generated_tokens=heartbeat.generated_tokens,
    )
