"""The cluster that an earlier start made on this node, as cluster.json describes it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from deploy.node.processes import find
from protocol.addresses import host_and_port
from protocol.errors import OperatorError
from protocol.node.home import ClusterState, ProcessRecord, read_cluster

_CONNECT_S = 2.0


class ClusterInUse(OperatorError):
    """A run uses the cluster, so the command changes nothing."""


def known_cluster() -> ClusterState | None:
    """Return the content of cluster.json; None when it is missing or invalid."""
    try:
        return read_cluster()
    except OperatorError:
        return None


def known_processes() -> dict[str, ProcessRecord]:
    """Return the processes in cluster.json, by name."""
    state = known_cluster()
    return {record.name: record for record in state.processes} if state is not None else {}


def is_ray_healthy(state: ClusterState) -> bool:
    """Return whether this node's Ray runs and, on the head, listens. Blocks 2 s at most."""
    record = next((record for record in state.processes if record.name == "ray"), None)
    if record is None or find(record) is None:
        return False
    try:
        if is_head(state):
            socket.create_connection(host_and_port(state.ray_address), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def is_head(state: ClusterState) -> bool:
    """Return whether this node is its cluster's head."""
    return state.options.get("address") is None


def connect_environment(state: ClusterState) -> None:
    """Set the environment variables that Ray reads when it is first imported."""
    os.environ |= state.ray_environment()


@contextmanager
def ray_connection(state: ClusterState) -> Iterator[None]:
    """Be a driver of the cluster's Ray within the block, which imports modules that need Ray.

    Raises: OperatorError when Ray does not answer.
    """
    connect_environment(state)
    from deploy.cluster.fleet_client import connection

    with connection(state.ray_address, state.node_ip):
        yield
