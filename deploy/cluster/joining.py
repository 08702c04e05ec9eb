"""What a node that joins needs beside the head's versions and code: a way there, a way back, and the same time."""

import socket
import time
from collections.abc import Callable
from contextlib import closing

from deploy.cluster.known import is_head
from protocol.addresses import family_of, host_and_port
from protocol.errors import OperatorError
from protocol.node.home import ClusterState
from protocol.ports import listen

_CONNECT_S = 5.0
# A ledger with times of two clocks is read by people: seconds between them are seen, and hours mislead.
_CLOCK_S = 5.0


def check_is_not_head(address: str | None, known: ClusterState | None) -> None:
    """Raise OperatorError for the head of a cluster that is to join itself. address: to be joined; None: of none."""
    if address is not None and known is not None and is_head(known) and known.ray_address == address:
        raise OperatorError(
            f"This node is the head at {address}: it has no need to join. Give the command on the other nodes, each "
            "with a SLUICE_HOME of its own; deploy/stop_cluster.sh first, where the head is to be another node."
        )


def check_way_to_head(address: str) -> None:
    """Raise OperatorError unless the head's Ray can be reached from here. address: HOST:PORT."""
    try:
        socket.create_connection(host_and_port(address), timeout=_CONNECT_S).close()
    except OSError as error:
        raise OperatorError(
            f"The head at {address} cannot be reached from this node ({error.strerror or error}). See that it runs "
            "(deploy/start_cluster.sh there), that it was started with a --node-ip that this node can reach, and that "
            "no firewall stands between."
        ) from None


def check_same_kind(node_ip: str, head_ip: str) -> None:
    """Raise OperatorError where one is known by an IPv4 address and the other by an IPv6 one: ranks would not meet."""
    if family_of(node_ip) != family_of(head_ip):
        raise OperatorError(
            f"The head is known by {head_ip} and this node by {node_ip}: nodes of one cluster meet over IPv4 or over "
            f"IPv6. Give --node-ip with this node's address of the head's kind; `ip -brief address` lists both."
        )


def check_way_back(node_ip: str, can_head_reach: Callable[[str, int], str]) -> None:
    """Raise OperatorError unless the head reaches this node.

    can_head_reach: has the head connect to an address and a port; returns why it could not, empty when it could.
    """
    with closing(listen(node_ip)) as listener:
        problem = can_head_reach(node_ip, int(listener.getsockname()[1]))
    if problem:
        raise OperatorError(
            f"The head cannot reach this node at {node_ip} ({problem}). Give the address by which it can with "
            "--node-ip, and let the cluster's nodes reach each other on all ports, or on those of --ports."
        )


def check_clock(head_time: Callable[[], float], clock: Callable[[], float] = time.time) -> None:
    """Raise OperatorError when this node's clock and the head's differ. head_time: asks the head, Unix seconds."""
    asked_at = clock()
    told = head_time()
    answered_at = clock()
    # The head looked at its clock at some moment in between.
    ahead_s = asked_at - told if asked_at > told else min(0.0, answered_at - told)
    if abs(ahead_s) > _CLOCK_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        raise OperatorError(
            f"This node's clock is {abs(ahead_s):.0f} s {side} the head's; {_CLOCK_S:g} s are allowed. Set both by a "
            "time server, such as with timedatectl set-ntp true."
        )
