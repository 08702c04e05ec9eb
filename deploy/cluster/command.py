"""`python -m deploy.cluster VERB`, for this node's cluster.

VERB: start, stop, status, nodes, wait-nodes, healthy.

Used by sluice start and sluice stop. Exit status: 0; 1 with one sentence; 2 for a wrong option.
"""

import errno
import sys
from collections.abc import Callable, Sequence

from deploy.cluster.known import is_ray_healthy, ray_connection
from deploy.cluster.start import start
from deploy.cluster.stop import stop
from deploy.cluster.tables import node_rows, show_cluster, show_nodes
from deploy.node.home import this_home
from deploy.node.service import is_healthy
from protocol.errors import NeighbourError, OperatorError, SettingsError
from protocol.node.home import read_cluster

_WAIT_NODES_S = 300.0  # default of wait-nodes
_USAGE = {
    "stop": "[--now]    ends this node's part, after the attached run has saved; --now: at once",
    "status": "[--json]    shows this node's processes and their logs",
    "nodes": "   shows every node of the cluster",
    "wait-nodes": "N [SECONDS]    returns when the cluster has N nodes; fails after SECONDS (300)",
    "healthy": "   returns when Ray and the services of this node are healthy: for probes",
}
_HELP = ("-h", "--help")
_DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # full, over a quota or a limit, read-only
_OF_SLUICE = ("stop", "status")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    verbs: dict[str, Callable[[Sequence[str]], None]] = {
        "start": start,
        "stop": stop,
        "status": _status,
        "nodes": _nodes,
        "wait-nodes": _wait_nodes,
        "healthy": _healthy,
    }
    if arguments and arguments[0] in _HELP:
        print(__doc__)
        return 0
    if not arguments or arguments[0] not in verbs:
        print(f"python -m deploy.cluster: give one of {', '.join(verbs)}.", file=sys.stderr)
        return 2
    if arguments[0] in _USAGE and set(arguments) & set(_HELP):
        command = "sluice" if arguments[0] in _OF_SLUICE else "python -m deploy.cluster"
        print(f"usage: {command} {arguments[0]} {_USAGE[arguments[0]]}")
        return 0
    return exit_status(lambda: verbs[arguments[0]](arguments[1:]))


def exit_status(verb: Callable[[], None]) -> int:
    """Run a verb; returns its exit status, with one sentence on standard error when it fails."""
    try:
        verb()
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except NeighbourError as error:  # Ray's process ended under `start --block`, or nodes did not join in time
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in _DISK_REFUSES:
            raise
        home = this_home().root
        print(f"{home} cannot be written: {error.strerror}. Free the disk, or set SLUICE_HOME.", file=sys.stderr)
        return 1
    return 0


def _nodes(arguments: Sequence[str]) -> None:
    _check_no_options("nodes", arguments)
    with ray_connection(read_cluster()):
        show_nodes(node_rows())


def _wait_nodes(arguments: Sequence[str]) -> None:
    """Return when the cluster has N nodes. Raises: OperatorError for wrong arguments; NeighbourError after SECONDS."""
    if len(arguments) not in (1, 2) or not all(argument.isdecimal() for argument in arguments):
        raise SettingsError("wait-nodes: give the number of nodes, and the seconds to wait for them (300).")
    if int(arguments[0]) < 1:
        raise SettingsError(f"wait-nodes: {arguments[0]} nodes are always there. Give a number from 1 on.")
    with ray_connection(read_cluster()):
        from deploy.cluster.keeper_client import await_nodes

        await_nodes(int(arguments[0]), float(arguments[1]) if len(arguments) > 1 else _WAIT_NODES_S)


def _healthy(arguments: Sequence[str]) -> None:
    """Return when Ray and the services of this node are healthy: for container probes, in half a second without Ray.

    Raises: OperatorError naming the parts that are down, or when no cluster runs.
    """
    _check_no_options("healthy", arguments)
    state, token_file = read_cluster(), this_home().token_file
    down = [
        record.name
        for record in state.processes
        if not (is_ray_healthy(state) if record.name == "ray" else is_healthy(record, token_file))
    ]
    if down:
        raise OperatorError(f"Down: {', '.join(down)}.")


def _status(arguments: Sequence[str]) -> None:
    """Show the table. Raises: OperatorError when no cluster runs, or a part of it is down."""
    _check_no_options("status", [each for each in arguments if each != "--json"])
    down = show_cluster(read_cluster(), this_home(), as_json="--json" in arguments)
    if down:
        raise OperatorError(
            f"Down: {', '.join(down)}. The node's keeper restarts an ended service by itself; "
            "sluice start starts the rest."
        )


def _check_no_options(verb: str, arguments: Sequence[str]) -> None:
    if arguments:
        raise SettingsError(
            f"{verb}: {arguments[0]} is not known; it takes {'--json' if verb == 'status' else 'no options'}."
        )
