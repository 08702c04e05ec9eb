"""The nodes of a cluster that are ready, their services healthy and kept: counted, and waited for."""

import time

from ray.util import list_named_actors

from protocol.errors import NeighbourError
from protocol.node.living import living_nodes
from protocol.ray_calls import keeper_of

_ASK_EVERY_S = 1.0


def await_nodes(number: int, timeout_s: float) -> None:
    """Return when so many nodes are ready, this one counted. Call it while connected.

    Raises: NeighbourError naming those that are, and those that have joined and are not.
    """
    deadline = time.monotonic() + timeout_s
    seen: set[str] = set()
    while len(ready := (nodes := _nodes())[True]) < number:
        for address in sorted(set(ready) - seen):
            print(f"Node {address} is ready ({len(ready)} of {number}).", flush=True)
        seen = set(ready)
        if time.monotonic() > deadline:
            problem = f"{len(ready)} of {number} were ready within {timeout_s:g} s: {', '.join(ready)}"
            if nodes[False]:
                problem += f"; {', '.join(nodes[False])} joined, and the services there are not healthy yet"
            raise NeighbourError("nodes", f"{problem}. deploy/start_cluster.sh --join on the others, then again here")
        time.sleep(_ASK_EVERY_S)
    print(f"{len(ready)} nodes are ready: {', '.join(ready)}.", flush=True)


def _nodes() -> dict[bool, list[str]]:
    """Return the addresses of the nodes that live: whether the node's start has come to its end -> those."""
    keepers = set(list_named_actors())
    nodes: dict[bool, list[str]] = {True: [], False: []}
    for node in living_nodes():
        nodes[keeper_of(node["NodeID"]) in keepers].append(str(node["NodeManagerAddress"]))
    return {is_ready: sorted(addresses) for is_ready, addresses in nodes.items()}
