"""Addresses: HOST:PORT as one text, this machine's address toward a peer, and the ports that Sluice may listen on.

An IPv6 address is in brackets, as in a URL: [fd00::1]:6379. `sluice start --ports` sets the range of ports that a
firewall leaves open; Ray passes our part of it to all processes as SLUICE_PORTS.
"""

import errno
import os
import re
import socket
from collections.abc import Callable, MutableMapping
from typing import TypeVar

import psutil

from protocol.errors import OperatorError

PORTS_VARIABLE = "SLUICE_PORTS"
_T = TypeVar("_T")
_FORM = re.compile(r"(?:\[(?P<bracketed>[^][\s]*:[^][\s]*)\]|(?P<plain>[^][:\s]+)):(?P<port>[0-9]{1,5})")


def with_port(host: str, port: int | str) -> str:
    """Return HOST:PORT, also for a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of an address, the host without brackets. Raises: ValueError for another form.

    Example: "[fd00::1]:6379" gives ("fd00::1", 6379).
    """
    found = _FORM.fullmatch(address)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise ValueError(f"{address} is not HOST:PORT")
    return found["bracketed"] or found["plain"], int(found["port"])


def family_of(host: str) -> socket.AddressFamily:
    """Return the socket family for listening at an address. host: an address, not a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def own_address_toward(host: str) -> str:
    """Return this machine's address on the route to a peer; sends nothing. host: an address or a name.

    IPv4 is preferred. Raises: OSError without a route.
    """
    problem = OSError(f"{host} has no address")
    for family, kind, _, _, there in sorted(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(there)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise problem


def name_interface(host: str, environment: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL use the interface that reaches `host`, unless the operator has named one.

    By default gloo uses the interface of the host name, which is loopback on Debian, and NCCL the first one that is up,
    such as a management network. environment: changed in place.
    """
    interface = _interface_of(own_address_toward(host))
    if interface is None:
        return
    environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface != "lo":
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": this name, not a prefix


def _interface_of(address: str) -> str | None:
    if address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def own_ports() -> range | None:
    """Return the ports that our processes may listen on; None: any free port.

    Example: SLUICE_PORTS=20500-20999 gives range(20500, 21000).
    """
    first, _, last = os.environ.get(PORTS_VARIABLE, "").partition("-")
    return range(int(first), int(last) + 1) if last else None


def bind_own_port(host: str, bind: Callable[[int], _T]) -> _T:
    """Return bind(port) for the first of our ports that is free; without a range for 0, which takes any.

    Raises: OperatorError when all are in use, and the other errors of `bind`.
    """
    ports = own_ports()
    for port in ports or (0,):
        try:
            return bind(port)
        except Exception as error:  # OSError, or ZeroMQ's own
            if ports is None or getattr(error, "errno", None) != errno.EADDRINUSE:
                raise
    raise OperatorError(
        f"Each port of {os.environ[PORTS_VARIABLE]} on {host} is taken. Start the cluster with a larger range: "
        "sluice start --ports FIRST-LAST."
    )


def listen(host: str) -> socket.socket:
    """Return a socket that listens on one of our ports at `host`. Raises: as `bind_own_port`."""
    return bind_own_port(host, lambda port: socket.create_server((host, port), family=family_of(host)))
