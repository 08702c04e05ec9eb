"""Living and drained nodes of Ray. Call these functions while connected to Ray.

A run leaves a drained node, and Ray starts no new process of ours there. Ray's head keeps the marks by Ray's node ids,
so that a node that was stopped and joins again is not drained.
"""

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

_NAMESPACE = b"sluice"
_CONNECT_S = 2.0
_MARK, _REPORT = "drained/", "leaving/"


class DrainReport(BaseModel):
    """The run's report about a drained node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str  # sentence for the operator
    is_over: bool = False  # True: the run has left the node
    is_stuck: bool = False  # True: some process has to stay there for now


def drain(node_id: str) -> None:
    """Mark a node as drained and forget earlier reports about it."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_REPORT + node_id, namespace=_NAMESPACE)
    internal_kv._internal_kv_put(_MARK + node_id, b"", namespace=_NAMESPACE)


def undrain(node_id: str) -> None:
    """Remove a node's mark, if it has one."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_MARK + node_id, namespace=_NAMESPACE)


def drained_nodes() -> frozenset[str]:
    """Return Ray's names of the drained nodes; some may be gone."""
    from ray.experimental import internal_kv

    keys = internal_kv._internal_kv_list(_MARK, namespace=_NAMESPACE)
    return frozenset(key.decode().removeprefix(_MARK) for key in keys)


def write_drain_report(node_id: str, report: DrainReport) -> None:
    """Write the run's report for the operator."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_REPORT + node_id, report.model_dump_json().encode(), namespace=_NAMESPACE)


def read_drain_report(node_id: str) -> DrainReport | None:
    """Return the run's report about a node since it was drained; None: there is none."""
    from ray.experimental import internal_kv

    found = internal_kv._internal_kv_get(_REPORT + node_id, namespace=_NAMESPACE)
    try:
        return None if found is None else DrainReport.model_validate_json(found)
    except ValidationError:
        return None


def living_nodes() -> list[Mapping[str, Any]]:
    """Return Ray's descriptions of the living nodes.

    Ray notices a node's death up to half a minute late. A node that restarts within that time is described twice as
    alive: the description whose port listens is returned. If both seem to listen, neither is.
    """
    import ray

    by_socket: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for node in ray.nodes():
        if node["Alive"]:
            # One living process at a time has this socket on a machine.
            by_socket.setdefault((node["NodeManagerAddress"], node["RayletSocketName"]), []).append(node)
    living = []
    for same in by_socket.values():
        listening = same if len(same) == 1 else [node for node in same if _listens(node)]
        if len(listening) == 1:
            living += listening
    return living


def _listens(node: Mapping[str, Any]) -> bool:
    with suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _CONNECT_S).close()
        return True
    return False
