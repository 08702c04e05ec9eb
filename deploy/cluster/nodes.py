"""The nodes of a cluster: counted, and waited for."""

import time

import ray

from protocol.errors import NeighbourError

_ASK_EVERY_S = 1.0


def await_nodes(number: int, timeout_s: float) -> None:
    """Return when so many nodes are in the cluster, this one counted. Call it while connected.

    Raises: NeighbourError naming those that came.
    """
    deadline = time.monotonic() + timeout_s
    seen: set[str] = set()
    while len(found := addresses()) < number:
        for address in sorted(set(found) - seen):
            print(f"Node {address} is here ({len(found)} of {number}).", flush=True)
        seen = set(found)
        if time.monotonic() > deadline:
            problem = f"{len(found)} of {number} came within {timeout_s:g} s: {', '.join(found)}"
            raise NeighbourError("nodes", f"{problem}. deploy/start_cluster.sh --join on the others, then again here")
        time.sleep(_ASK_EVERY_S)
    print(f"All {number} nodes are here: {', '.join(found)}.", flush=True)


def addresses() -> list[str]:
    """Return the addresses of the nodes that live."""
    return sorted(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])
