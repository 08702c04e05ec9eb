"""What is known of the rollout servers, and which of them to lease to next."""

from collections.abc import Set
from dataclasses import dataclass

from learner.live.status import ServerStatus
from protocol.wire import messages as m

# A connection that broke is tried again after 0.1 to 2 s.
_RECONNECT_S = 4.0


@dataclass
class Server:
    """A rollout server as its latest messages describe it."""

    is_here: bool = False  # it has spoken since it was last lost
    newest_lease: int = 0  # number of the last lease that it was sent
    unreachable_since: float | None = None  # monotonic seconds of the first message that found no connection, if so
    policy_version: int | None = None  # of the weights it holds; None while they are not synced
    num_wanted: int = 0  # groups that it could take now
    heartbeat: m.Heartbeat | None = None  # its newest; None before the first


class Servers:
    """Servers by name; one is known from its first message on."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}

    def note(self, name: str) -> Server:
        """Take a server as being here; returns what is known of it, nothing yet for a new one."""
        server = self._servers.setdefault(name, Server())
        server.is_here, server.unreachable_since = True, None
        return server

    def note_unreachable(self, name: str, now: float) -> bool:
        """Take in that a server has no connection; True when it had none for so long that it will not come back.

        A process that ended closed its connections. One that is busy, or behind a slow link, keeps them.
        """
        server = self._servers.get(name)
        if server is None or not server.is_here:
            return False
        if server.unreachable_since is None:
            server.unreachable_since = now
        return now - server.unreachable_since >= _RECONNECT_S

    def newest_leases(self) -> dict[str, int]:
        """Return, for each server that is here, the number of the last lease that it was sent."""
        return {name: server.newest_lease for name, server in self._servers.items() if server.is_here}

    def note_hello(self, name: str, message: m.Hello) -> None:
        self.note(name).policy_version = message.policy_version

    def note_demand(self, name: str, message: m.Demand) -> None:
        server = self.note(name)
        server.num_wanted, server.policy_version = message.num_groups, message.policy_version

    def note_heartbeat(self, name: str, message: m.Heartbeat) -> None:
        server = self.note(name)
        server.heartbeat, server.policy_version = message, message.policy_version

    def forget_state(self, name: str, num_wanted: int) -> None:
        """Take a server for one whose weights are unknown: it died or started again."""
        server = self._servers.setdefault(name, Server())
        server.is_here, server.num_wanted, server.policy_version = False, num_wanted, None

    def next_to_lease(self, versions: range, other_than: Set[str] = frozenset()) -> str | None:
        """Return the server that wants most, of those whose weights are of one of these versions."""
        able = self.able(versions) - other_than
        wanted = [(self._servers[name].num_wanted, name) for name in able if self._servers[name].num_wanted > 0]
        return max(wanted)[1] if wanted else None

    def able(self, versions: range) -> set[str]:
        """Return the servers whose samples would be of use, whether they want some now or are busy."""
        return {name for name, server in self._servers.items() if server.policy_version in versions}

    def reserve_slot(self, name: str, number: int) -> int:
        """Give one of the groups that a server wants to the lease of this number; returns its weights' version."""
        server = self._servers[name]
        assert server.policy_version is not None
        server.num_wanted -= 1
        server.newest_lease = number
        return server.policy_version

    def absent(self) -> list[str]:
        """Return the servers that were here and were lost: they are gone, or cannot be reached."""
        return sorted(name for name, server in self._servers.items() if not server.is_here)

    def lack_weights(self, versions: range) -> bool:
        """Return whether servers are here and none of them holds weights of these versions: nothing can be leased."""
        here = [server for server in self._servers.values() if server.is_here]
        return bool(here) and not any(server.policy_version in versions for server in here)

    def status(self) -> dict[str, ServerStatus | None]:
        """Return what a live view shows of each server; None before its first heartbeat."""
        return {name: _beat(server.heartbeat) for name, server in self._servers.items()}


def _beat(heartbeat: m.Heartbeat | None) -> ServerStatus | None:
    if heartbeat is None:
        return None
    return ServerStatus(
        policy_version=heartbeat.policy_version,
        running=heartbeat.num_running,
        waiting=heartbeat.num_waiting,
        generated_tokens=heartbeat.generated_tokens,
        failures=heartbeat.failures,
    )
