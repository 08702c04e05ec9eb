"""Checks that the cluster of a run still exists, without Ray's own calls, which would wait a minute."""

import socket

import psutil

from protocol.addresses import host_and_port
from protocol.errors import NeighbourError
from protocol.node.home import ClusterState, ProcessRecord

_CONNECT_S = 5.0
# Process start times are read from counters that are rounded differently by different tools.
_SAME_START_S = 1.0
_RAY = "ray"


def describe_cluster_loss(cluster: ClusterState) -> str | None:
    """Return which part of Ray is gone, for an error message; None while Ray runs. Blocks for 5 s at most."""
    for process in cluster.processes:
        if process.name == _RAY and not _is_running(process):
            return f"Ray's process on this node ({process.pid}) is gone"
    try:
        socket.create_connection(host_and_port(cluster.ray_address), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"Ray at {cluster.ray_address} does not answer ({error.strerror or error})"
    return None


def check_cluster(cluster: ClusterState) -> None:
    """Raise NeighbourError when a part of Ray is gone."""
    if (loss := describe_cluster_loss(cluster)) is not None:
        raise NeighbourError("the cluster", loss)


def _is_running(record: ProcessRecord) -> bool:
    """Return whether the recorded process runs. The start time is compared, because another may have its pid now."""
    try:
        process = psutil.Process(record.pid)
        is_same = record.is_still(process.create_time(), _SAME_START_S)
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
