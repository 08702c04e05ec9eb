"""`python -m deploy.cluster drain NODE | undrain NODE`: move servers and ranks off a node, and start none there.

Importing this module imports Ray, which reads its environment at once: call `connect_environment` first.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from deploy.cluster.fleet_client import describe_fleet, describe_servers, stop_server
from deploy.cluster.keeper_client import HEAD_RESOURCE
from protocol.errors import OperatorError
from protocol.node.ray_nodes import drain, living_nodes, read_drain_report, undrain

_ANSWER_S = 20.0
_STOP_S = 90.0
_REPLY_S = 60.0
_POLL_S = 0.5


def drain_node(arguments: Sequence[str], reply_s: float = _REPLY_S) -> str:
    """Mark a node as drained; returns a sentence once it is empty. Call it while connected.

    Blocks for an engine's start and a step, while a run moves away. reply_s: longest wait for the run's reply.
    Raises: OperatorError when there is no such node, or a process has to stay; the mark remains.
    """
    node = _find("drain", arguments)
    node_id, address = str(node["NodeID"]), str(node["NodeManagerAddress"])
    if HEAD_RESOURCE in node["Resources"]:
        raise OperatorError(f"drain: {address} is the head, which the cluster needs. Drain other nodes.")
    drain(node_id)
    print(f"Node {address} takes no new servers or ranks.", flush=True)
    begun, shown = time.monotonic(), ""
    while True:
        if not _is_alive(node_id):
            return f"Node {address} is gone."
        fleet = describe_fleet(_ANSWER_S)
        if fleet is None or not fleet["is_lending"]:
            _stop_servers(node_id)
            return _empty(address)
        word = read_drain_report(node_id)
        if word is not None and word.is_over:
            return _empty(address)
        if word is not None and word.is_stuck:
            raise OperatorError(f"drain: {word.text} The node stays marked, and the run leaves it when it can.")
        if word is not None and word.text != shown:
            print(word.text, flush=True)
            shown = word.text
        if word is None and time.monotonic() - begun > reply_s:
            raise OperatorError(
                f"drain: the run has not answered within {reply_s:g} s. It answers once it trains: the node stays "
                "marked, and the same command waits again."
            )
        time.sleep(_POLL_S)


def undrain_node(arguments: Sequence[str]) -> str:
    """Let processes start on a node again; returns a sentence. Call it while connected.

    Raises: OperatorError when there is no such node.
    """
    node = _find("undrain", arguments)
    undrain(str(node["NodeID"]))
    return (
        f"Node {node['NodeManagerAddress']} takes servers and ranks again. A running run uses it with "
        "python -m deploy.cluster servers RUN +1."
    )


def _stop_servers(node_id: str) -> None:
    """Stop the node's idle servers. Raises: OperatorError naming servers that do not answer."""
    servers = describe_servers(_ANSWER_S)
    for server in servers:
        if server.get("node_id") == node_id:
            stop_server(str(server["name"]), _STOP_S)
    if silent := [str(server["name"]) for server in servers if not server.get("node_id")]:
        raise OperatorError(
            f"drain: {', '.join(silent)} does not answer, and may be there. The node stays marked; the same command "
            "asks again, and deploy/stop_cluster.sh there ends its processes."
        )


def _find(verb: str, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return Ray's description of the named node. Raises: OperatorError."""
    if len(arguments) != 1:
        raise OperatorError(f"{verb}: give one node by its address, as python -m deploy.cluster nodes shows it.")
    nodes = {str(node["NodeManagerAddress"]): node for node in living_nodes()}
    if arguments[0] not in nodes:
        raise OperatorError(f"{verb}: the cluster has no node {arguments[0]}. There are {', '.join(sorted(nodes))}.")
    found: Mapping[str, Any] = nodes[arguments[0]]
    return found


def _is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def _empty(address: str) -> str:
    return (
        f"Node {address} is drained: only its services are there, which deploy/stop_cluster.sh ends there. It takes "
        "servers and ranks again after undrain, or after a stop and a new join."
    )
