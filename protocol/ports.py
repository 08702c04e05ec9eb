"""On which ports our processes listen for those of other nodes: in the range that a firewall leaves open, or on any.

`start_cluster.sh --ports` names the range; Ray and all that it starts find our part of it in SLUICE_PORTS.
"""

import errno
import os
import socket

from protocol.addresses import family_of
from protocol.errors import OperatorError

VARIABLE = "SLUICE_PORTS"


def own_ports() -> range | None:
    """Return the ports that our processes may listen on; None: any that the system chooses.

    Example: SLUICE_PORTS=20500-20999 gives range(20500, 21000).
    """
    first, _, last = os.environ.get(VARIABLE, "").partition("-")
    return range(int(first), int(last) + 1) if last else None


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a port of ours at `host`. Raises: OperatorError when all of them are taken."""
    ports = own_ports()
    for port in ports or (0,):
        try:
            return socket.create_server((host, port), family=family_of(host))
        except OSError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise
    raise no_free_port(host)


def no_free_port(host: str) -> OperatorError:
    """Return what is said when every port of the range is taken."""
    return OperatorError(
        f"Each port of {os.environ[VARIABLE]} on {host} is taken. Start the cluster with a larger range: "
        "deploy/start_cluster.sh --ports FIRST-LAST."
    )
