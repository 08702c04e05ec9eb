"""What is known of the rollout servers, and which of them to lease to next.

Used by the coordinator and `learner.lease_book`.
"""

import time
from dataclasses import dataclass

from protocol import messages as m


@dataclass
class Server:
    """A rollout server as its latest messages describe it. policy_version: None while its weights are not synced.

    is_here: it has spoken since it was last lost.
    """

    is_here: bool = False
    policy_version: int | None = None
    num_wanted: int = 0
    heartbeat: m.Heartbeat | None = None


class ServerBook:
    """Servers by name; one is known from its first message on."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}

    def note(self, name: str) -> Server:
        """Take a server as being here; returns what is known of it, nothing yet for a new one."""
        server = self._servers.setdefault(name, Server())
        server.is_here = True
        return server

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

    def next_to_lease(self, versions: range) -> str | None:
        """Return the server that wants most, of those whose weights are of one of these versions."""
        able = [
            (server.num_wanted, name)
            for name, server in self._servers.items()
            if server.num_wanted > 0 and server.policy_version in versions
        ]
        return max(able)[1] if able else None

    def take_wish(self, name: str) -> int:
        """Count one of the groups that a server wants as given; returns the version of its weights."""
        server = self._servers[name]
        assert server.policy_version is not None
        server.num_wanted -= 1
        return server.policy_version

    def lack_weights(self, versions: range) -> bool:
        """Return whether servers are here and none of them holds weights of these versions: nothing can be leased."""
        here = [server for server in self._servers.values() if server.is_here]
        return bool(here) and not any(server.policy_version in versions for server in here)

    def newest_version(self) -> int:
        """Return the newest version that a server says it holds, 0 when none holds any."""
        return max((server.policy_version or 0 for server in self._servers.values()), default=0)

    def status(self) -> dict[str, dict[str, object] | None]:
        """Return what a live view shows of each server; None before its first heartbeat."""
        return {name: _beat(server.heartbeat) for name, server in self._servers.items()}


def _beat(heartbeat: m.Heartbeat | None) -> dict[str, object] | None:
    if heartbeat is None:
        return None
    return {
        "policy_version": heartbeat.policy_version,
        "running": heartbeat.num_running,
        "waiting": heartbeat.num_waiting,
        "generated_tokens": heartbeat.generated_tokens,
        "failures": heartbeat.failures,
        "at": time.time(),
    }
