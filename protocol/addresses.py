"""HOST:PORT as one text, and by which of its addresses a peer sees this machine.

An IPv6 address stands in brackets before its port, as in a URL: [fd00::1]:6379.
"""

import re
import socket

_FORM = re.compile(r"(?:\[(?P<bracketed>[^][\s]*:[^][\s]*)\]|(?P<plain>[^][:\s]+)):(?P<port>[0-9]{1,5})")


def with_port(host: str, port: int | str) -> str:
    """Return both as one text, which is also what a URL names a server by."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of an address, the host without brackets. Raises: ValueError where it has no such form.

    Example: "[fd00::1]:6379" gives ("fd00::1", 6379).
    """
    found = _FORM.fullmatch(address)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise ValueError(f"{address} is not HOST:PORT")
    return found["bracketed"] or found["plain"], int(found["port"])


def family_of(host: str) -> socket.AddressFamily:
    """Return what a socket needs that is to listen at this address of a machine. host: an address, not a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def own_address_toward(host: str) -> str:
    """Return this machine's address on the route to a peer; sends nothing. host: an address or a name.

    By IPv4 where the name has addresses of both kinds and there is a route. Raises: OSError where there is none.
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
