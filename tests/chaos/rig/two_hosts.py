"""Two hosts on one machine: network namespaces joined by a veth pair, whose link can be cut and joined again.

Needs root, iproute2 and the right to make namespaces. Nothing of the machine's own network is touched.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)


class TwoHosts:
    """`near` and `far` are host names for `enter`; the addresses are those of the two ends of the link."""

    near_address = "10.213.7.1"
    far_address = "10.213.7.2"

    def __init__(self, tag: str) -> None:
        self.near, self.far = f"sluice-near-{tag}", f"sluice-far-{tag}"
        self._ends = {self.near: (f"sn{tag}", self.near_address), self.far: (f"sf{tag}", self.far_address)}

    @property
    def far_end(self) -> str:
        """The far host's network device on the link."""
        return self._ends[self.far][0]

    def make(self) -> None:
        """Raises: subprocess.CalledProcessError whose stderr says what is not allowed or not there."""
        for host in self._ends:
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
        (near_end, _), (far_end, _) = self._ends[self.near], self._ends[self.far]
        _ip("-n", self.near, "link", "add", near_end, "type", "veth", "peer", "name", far_end, "netns", self.far)
        for host, (end, address) in self._ends.items():
            _ip("-n", host, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", host, "link", "set", end, "up")

    def remove(self) -> None:
        """The link goes with the namespaces, and these with the last process in them."""
        for host in self._ends:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)

    def join(self) -> None:
        _ip("-n", self.far, "link", "set", self._ends[self.far][0], "up")

    def enter(self, host: str) -> None:
        """Move this process, which must have one thread, to a host; what it forks from now on is there too."""
        with open(f"/run/netns/{host}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                number = ctypes.get_errno()
                raise OSError(number, f"cannot enter {host}: {os.strerror(number)}")


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Yield two joined hosts, gone afterwards. Raises: as `make`."""
    hosts = TwoHosts(str(os.getpid()))
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def why_impossible() -> str | None:
    """Return why this machine cannot have two hosts, None where it can."""
    try:
        with two_hosts():
            return None
    except FileNotFoundError:
        return "iproute2 is not installed"
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
