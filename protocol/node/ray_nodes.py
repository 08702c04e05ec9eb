"""The living nodes of Ray."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_CONNECT_S = 2.0


def living_nodes() -> list[Mapping[str, Any]]:
    """Return Ray's descriptions of the living nodes. Call it while connected to Ray.

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
