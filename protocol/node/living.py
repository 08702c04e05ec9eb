"""The nodes that live, each once. Call it while connected to Ray."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_CONNECT_S = 2.0


def living_nodes() -> list[Mapping[str, Any]]:
    """Return the nodes that live, as Ray describes them.

    Ray notices half a minute late that a node's processes have died. One that comes back before is described twice, and
    both times as alive: the one that listens counts; none, until Ray has noticed, where both seem to.
    """
    import ray

    there: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for node in ray.nodes():
        if node["Alive"]:
            # No two processes at a time can have this file on this machine.
            there.setdefault((node["NodeManagerAddress"], node["RayletSocketName"]), []).append(node)
    living = []
    for same in there.values():
        listening = same if len(same) == 1 else [node for node in same if _listens(node)]
        if len(listening) == 1:
            living += listening
    return living


def _listens(node: Mapping[str, Any]) -> bool:
    with suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _CONNECT_S).close()
        return True
    return False
