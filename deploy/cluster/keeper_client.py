"""Calls to the keepers of nodes, and the wait for nodes to be ready: a node with a keeper has finished its start.

Importing this module imports Ray, which reads its environment at once: call `connect_environment` first.
"""

import contextlib
from typing import Any

import ray
from ray.util import list_named_actors

from deploy.cluster.fleet_client import ask, detached_here, find_actor
from deploy.node.home import Home
from deploy.node.keeper import KEEPER_ROOMS, Keeper, ServiceInfo
from protocol.errors import NeighbourError, OperatorError
from protocol.node.identity import code_digest
from protocol.ray_calls import keeper_of, living_nodes, own_node_id
from protocol.waits import until

_POLL_S = 0.2
_NODES_POLL_S = 1.0
# Resource that Ray's head alone has.
HEAD_RESOURCE = "node:__internal_head__"


def keep_services(home: Home, timeout_s: float) -> None:
    """Make this node's keeper watch the services in cluster.json. A keeper of other code is restarted.

    Raises: OperatorError when the keeper does not answer in time.
    """
    options = detached_here(keeper_of(own_node_id()))
    keeper = ray.remote(Keeper).options(**options, max_concurrency=4).remote(str(home.root))
    code = code_digest(KEEPER_ROOMS)
    for _ in until(timeout_s, _POLL_S):
        with contextlib.suppress(OperatorError):  # while Ray restarts it, it does not answer
            if ask(keeper.code.remote(), timeout_s, "keeper") == code:
                ask(keeper.keep.remote(), timeout_s, "keeper")
                return
            ray.kill(keeper, no_restart=False)  # the new process imports the new code; services keep running
    raise OperatorError(f"The keeper of this node's services did not answer within {timeout_s:g} s.")


def forget_services(names: list[str], timeout_s: float) -> None:
    """Make this node's keeper, if there is one, stop watching services: then they can be ended."""
    keeper = _own_keeper()
    if keeper is not None:
        ask(keeper.forget.remote(names), timeout_s, "keeper")


def describe_services(timeout_s: float) -> dict[str, ServiceInfo] | None:
    """Return the keeper's facts by service; None when no keeper answers on this node."""
    keeper = _own_keeper()
    if keeper is None:
        return None
    try:
        return {info["name"]: info for info in ask(keeper.describe.remote(), timeout_s, "keeper")}
    except OperatorError:
        return None


def head_keeper(timeout_s: float) -> tuple[str, Any]:
    """Return the head's address and its keeper. Waits while the head is still starting.

    Raises: OperatorError when there is none within timeout_s.
    """
    for _ in until(timeout_s, _POLL_S):
        for node in ray.nodes():
            is_head = node["Alive"] and HEAD_RESOURCE in node["Resources"]
            if is_head and (keeper := find_actor(keeper_of(node["NodeID"]))) is not None:
                return str(node["NodeManagerAddress"]), keeper
    raise OperatorError("The head's node has no keeper. Run sluice start there: it starts what is missing.")


def await_nodes(number: int, timeout_s: float) -> None:
    """Return when `number` nodes are ready, this one included. Call it while connected.

    Raises: NeighbourError naming the ready nodes, and those that joined and are not ready.
    """
    seen: set[str] = set()
    for _ in until(timeout_s, _NODES_POLL_S):
        ready, starting = _nodes()
        if len(ready) >= number:
            print(f"{len(ready)} nodes are ready: {', '.join(ready)}.", flush=True)
            return
        for address in sorted(set(ready) - seen):
            print(f"Node {address} is ready ({len(ready)} of {number}).", flush=True)
        seen = set(ready)
    problem = f"{len(ready)} of {number} were ready within {timeout_s:g} s: {', '.join(ready)}"
    if starting:
        problem += f"; {', '.join(starting)} joined, and the services there are not healthy yet"
    raise NeighbourError("nodes", f"{problem}. sluice start --join on the others, then again here")


def _own_keeper() -> Any:
    return find_actor(keeper_of(own_node_id()))


def _nodes() -> tuple[list[str], list[str]]:
    """Return the addresses of the ready nodes, and of those that are still starting."""
    keepers = set(list_named_actors())
    nodes: dict[bool, list[str]] = {True: [], False: []}
    for node in living_nodes():
        nodes[keeper_of(node["NodeID"]) in keepers].append(str(node["NodeManagerAddress"]))
    return sorted(nodes[True]), sorted(nodes[False])
