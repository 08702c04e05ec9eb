"""`deploy.cluster stop`: ends this node's part of a cluster, after the run that uses it has saved and ended."""

import sys
from collections.abc import Sequence

from deploy.cluster.known import RunStays, connect_environment, is_head, is_ray_well, known_cluster, known_processes
from deploy.cluster.node_ray.processes import end_ray, ray_processes
from deploy.node.home import check_held_by_none_other, exclusive, this_home
from deploy.node.processes import end, family, find
from protocol.errors import OperatorError, SettingsError
from protocol.node.home import ClusterState, cluster_path

_ANSWER_S = 10.0
_STOP_SERVERS_S = 60.0


def stop(arguments: Sequence[str]) -> None:
    """End everything of this node's cluster; nothing running is fine."""
    unknown = [argument for argument in arguments if argument != "--now"]
    if unknown:
        raise SettingsError(
            f"stop_cluster: {unknown[0]} is not known; the only option is --now, which does not wait for a run."
        )
    home = this_home()
    if not home.root.is_dir():
        print("No Sluice cluster runs here.")
        return
    with exclusive(home):
        check_held_by_none_other(home)
        state = known_cluster()
        was_running = bool(known_processes() or ray_processes(home))
        if state is not None and is_ray_well(state):
            _end_orderly(state, is_now="--now" in arguments)
        end_ray(home)
        end(family(process for record in known_processes().values() if (process := find(record))))
        cluster_path().unlink(missing_ok=True)
    print("Stopped." if was_running else "No Sluice cluster runs here.")


def _end_orderly(state: ClusterState, is_now: bool) -> None:
    """Have the attached run and the servers end by themselves; what cannot is ended with Ray's other processes.

    Raises: RunStays when a run is attached that this command cannot end, or that does not end.
    """
    connect_environment(state)
    from deploy.cluster.attached_run import drain, find_attached_run
    from deploy.cluster.fleet_client import connected, stop_servers
    from deploy.cluster.keeper_client import forget_services

    try:
        with connected(state.ray_address, state.node_ip):
            run = None if _has_left(state) else find_attached_run(_ANSWER_S)
            if run is not None:
                _say_what_happens(str(run), is_now)
                if not is_now:
                    drain(run)
            forget_services(list(known_processes()), _ANSWER_S)
            if is_head(state):  # the servers of other nodes are not this node's
                stop_servers(_STOP_SERVERS_S)
    except RunStays:
        raise
    except OperatorError as error:
        print(f"{error} Its servers are ended with Ray.", file=sys.stderr)


def _has_left(state: ClusterState) -> bool:
    """Return whether this node is drained, and the run that uses the cluster has left it."""
    from deploy.cluster.keeper_client import own_node
    from protocol.node.drained import drained_nodes, said_leaving

    node = own_node()
    word = said_leaving(node) if node in drained_nodes() else None
    return not is_head(state) and word is not None and word.is_over


def _say_what_happens(run: str, is_now: bool) -> None:
    if is_now:
        print(f"Ending {run} at once: what is in no checkpoint is lost.", flush=True)
    else:
        print(
            f"Stopping {run} first: it ends after its step, with a checkpoint. "
            "deploy/stop_cluster.sh --now does not wait for it.",
            flush=True,
        )
