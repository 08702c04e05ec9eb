"""`--ports FIRST-LAST`: where listens what other nodes have to reach, for a firewall between them.

The first ten ports are Ray's own processes', then half of the rest its workers', the other half ours.
Example: 20000-20999 is 20000 to 20009, 20010 to 20504, 20505 to 20999.
"""

import re
from dataclasses import dataclass

from protocol.errors import SettingsError

_PROCESSES = (
    "node-manager",
    "object-manager",
    "dashboard-agent-listen",
    "dashboard-agent-grpc",
    "runtime-env-agent",
    "metrics-export",
)
_NUM_OF_RAY = 10
# A worker of Ray has a port of its own, and Ray starts one for each CPU and each actor.
_FEWEST = 200
_LOWEST = 1024


@dataclass(frozen=True)
class PortRange:
    """Ports from `first` to `last`, both among them."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    @property
    def for_ray(self) -> dict[str, int]:
        """What `ray start` is told: the ports of its processes on each node."""
        workers = {"--min-worker-port": self.first + _NUM_OF_RAY, "--max-worker-port": self._first_of_ours - 1}
        return {**{f"--{name}-port": self.first + place for place, name in enumerate(_PROCESSES)}, **workers}

    @property
    def for_ray_client(self) -> int:
        """The port of Ray's proxy for remote drivers, on the head."""
        return self.first + _NUM_OF_RAY - 1

    @property
    def ours(self) -> str:
        """FIRST-LAST of what our own processes listen on: coordinator, rank 0, the groups of weight pushes."""
        return f"{self._first_of_ours}-{self.last}"

    @property
    def _first_of_ours(self) -> int:
        return (self.first + _NUM_OF_RAY + self.last + 1) // 2


def read_port_range(text: str) -> PortRange:
    """Return the range that FIRST-LAST names. Raises: SettingsError for one that cannot be, or is too small."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None:
        raise SettingsError(f"start_cluster: --ports {text} is not FIRST-LAST. Give a range such as 20000-20999.")
    first, last = int(found[1]), int(found[2])
    if first < _LOWEST or not first + _FEWEST - 1 <= last <= 65535:
        raise SettingsError(
            f"start_cluster: --ports {text}: expected at least {_FEWEST} ports from {_LOWEST} to 65535. "
            "Give a range such as 20000-20999."
        )
    return PortRange(first, last)
