"""`python -m deploy.cluster start | stop | status`: this node's part of a cluster.

Behind deploy/start_cluster.sh and deploy/stop_cluster.sh. Exit status: 0; 1 with one sentence; 2 for a wrong option.
"""

import sys
from collections.abc import Sequence

from deploy.cluster.show import show_cluster
from deploy.cluster.start import start
from deploy.cluster.stop import stop
from deploy.node.home import this_home
from protocol.errors import OperatorError
from protocol.node.home import read_cluster


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    verbs = {"start": start, "stop": stop, "status": _status}
    if not arguments or arguments[0] not in verbs:
        print(f"python -m deploy.cluster: give one of {', '.join(verbs)}.", file=sys.stderr)
        return 2
    try:
        verbs[arguments[0]](arguments[1:])
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _status(arguments: Sequence[str]) -> None:
    """Show the table. Raises: OperatorError when no cluster runs, or when a part of it is down."""
    if arguments:
        raise OperatorError(f"status: {arguments[0]} is not known; it takes no options.")
    down = show_cluster(read_cluster(), this_home())
    if down:
        raise OperatorError(
            f"Down: {', '.join(down)}. The node's keeper starts an ended service again by itself; what stays down, "
            "deploy/start_cluster.sh starts."
        )
