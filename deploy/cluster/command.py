"""`python -m deploy.cluster VERB`, for this node's cluster.

VERB: start, stop, status, nodes, wait-nodes, servers, drain, undrain, healthy.

Behind deploy/start_cluster.sh and deploy/stop_cluster.sh. Exit status: 0; 1 with one sentence; 2 for a wrong option.
"""

import sys
from collections.abc import Callable, Sequence

from deploy.cluster.known import connect_environment, is_ray_well
from deploy.cluster.servers import change_servers
from deploy.cluster.start import start
from deploy.cluster.stop import stop
from deploy.cluster.tables.show import show_cluster
from deploy.node.home import this_home
from deploy.node.service_health import is_healthy
from protocol.errors import NeighbourError, OperatorError, SettingsError
from protocol.node.home import read_cluster

_NODES_S = 300.0
_USAGE = {
    "stop": "[--now]    ends this node's part, after the run that uses it has saved; --now: at once",
    "status": "   shows what of this node's part runs, and where its logs are",
    "nodes": "   shows every node of the cluster",
    "wait-nodes": "N [SECONDS]    returns when the cluster has N nodes; fails after so many seconds (300)",
    "servers": "RUN +N|-N    has a run that goes on use so many rollout servers more, or fewer",
    "drain": "ADDRESS    has what runs on a node leave it, and nothing new start there",
    "undrain": "ADDRESS    lets a node take processes again",
    "healthy": "   returns when Ray and the services of this node are well: for probes",
}
_HELP = ("-h", "--help")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    verbs = {
        "start": start,
        "stop": stop,
        "status": _status,
        "nodes": _nodes,
        "wait-nodes": _wait_nodes,
        "servers": _servers,
        "drain": _drain,
        "undrain": _undrain,
        "healthy": _healthy,
    }
    if arguments and arguments[0] in _HELP:
        print(__doc__)
        return 0
    if not arguments or arguments[0] not in verbs:
        print(f"python -m deploy.cluster: give one of {', '.join(verbs)}.", file=sys.stderr)
        return 2
    if arguments[0] in _USAGE and set(arguments) & set(_HELP):
        print(f"usage: python -m deploy.cluster {arguments[0]} {_USAGE[arguments[0]]}")
        return 0
    return exit_status(lambda: verbs[arguments[0]](arguments[1:]))


def exit_status(verb: Callable[[], None]) -> int:
    """Return the status with which a verb ends, having told in one sentence of what failed."""
    try:
        verb()
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except NeighbourError as error:  # Ray's process ended under a start that stays in the foreground
        print(error, file=sys.stderr)
        return 1
    return 0


def _nodes(arguments: Sequence[str]) -> None:
    """Show every node of the cluster. Raises: OperatorError when no cluster runs here, or Ray does not answer."""
    if arguments:
        raise SettingsError(f"nodes: {arguments[0]} is not known; it takes no options.")
    state = read_cluster()
    connect_environment(state)
    from deploy.cluster.fleet_client import connected
    from deploy.cluster.tables.node_table import node_rows, show_nodes

    with connected(state.ray_address, state.node_ip):
        show_nodes(node_rows())


def _wait_nodes(arguments: Sequence[str]) -> None:
    """Return when so many nodes are in the cluster. Raises: OperatorError when they do not come."""
    if len(arguments) not in (1, 2) or not all(argument.isdecimal() for argument in arguments):
        raise SettingsError("wait-nodes: give the number of nodes, and the seconds to wait for them (300).")
    if int(arguments[0]) < 1:
        raise SettingsError(f"wait-nodes: {arguments[0]} nodes are always there. Give a number from 1 on.")
    state = read_cluster()
    connect_environment(state)
    from deploy.cluster.fleet_client import connected
    from deploy.cluster.nodes import await_nodes

    with connected(state.ray_address, state.node_ip):
        await_nodes(int(arguments[0]), float(arguments[1]) if len(arguments) > 1 else _NODES_S)


def _servers(arguments: Sequence[str]) -> None:
    """Have a run use more or fewer rollout servers. Raises: OperatorError when it cannot."""
    print(change_servers(arguments))


def _drain(arguments: Sequence[str]) -> None:
    """Have a node be left by what runs there. Raises: OperatorError when something has to stay."""
    _check_names_a_node("drain", arguments)
    state = read_cluster()
    connect_environment(state)
    from deploy.cluster.drain import drain_node
    from deploy.cluster.fleet_client import connected

    with connected(state.ray_address, state.node_ip):
        print(drain_node(arguments))


def _undrain(arguments: Sequence[str]) -> None:
    """Let a node take processes again. Raises: OperatorError when there is no such node."""
    _check_names_a_node("undrain", arguments)
    state = read_cluster()
    connect_environment(state)
    from deploy.cluster.drain import undrain_node
    from deploy.cluster.fleet_client import connected

    with connected(state.ray_address, state.node_ip):
        print(undrain_node(arguments))


def _check_names_a_node(verb: str, arguments: Sequence[str]) -> None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SettingsError(
            f"{verb}: give one node by its address, as python -m deploy.cluster nodes shows it: {verb} 10.0.0.2."
        )


def _healthy(arguments: Sequence[str]) -> None:
    """Return when Ray and the services of this node are well: for probes of containers, in half a second without Ray.

    Raises: OperatorError naming what is down, or when no cluster runs.
    """
    if arguments:
        raise SettingsError(f"healthy: {arguments[0]} is not known; it takes no options.")
    state, token_file = read_cluster(), this_home().token_file
    down = [
        record.name
        for record in state.processes
        if not (is_ray_well(state) if record.name == "ray" else is_healthy(record, token_file))
    ]
    if down:
        raise OperatorError(f"Down: {', '.join(down)}.")


def _status(arguments: Sequence[str]) -> None:
    """Show the table. Raises: OperatorError when no cluster runs, or when a part of it is down."""
    if arguments:
        raise SettingsError(f"status: {arguments[0]} is not known; it takes no options.")
    down = show_cluster(read_cluster(), this_home())
    if down:
        raise OperatorError(
            f"Down: {', '.join(down)}. The node's keeper starts an ended service again by itself; what stays down, "
            "deploy/start_cluster.sh starts."
        )
