"""`deploy.cluster stop`: ends this node's part of a cluster, after the attached run has saved and ended."""

import sys
from collections.abc import Sequence

from deploy.cluster.known import ClusterInUse, is_head, is_ray_healthy, known_cluster, known_processes, ray_connection
from deploy.cluster.options import StartOptions
from deploy.cluster.ray_processes import end_ray, ray_processes
from deploy.cluster.reuse import format_options
from deploy.node.home import check_not_used_elsewhere, exclusive, this_home
from deploy.node.processes import end, family, find
from protocol.errors import OperatorError, SettingsError
from protocol.node.home import ClusterState, cluster_path
from protocol.node.identity import sluice_command

_ANSWER_S = 10.0
_STOP_SERVERS_S = 60.0


def stop(arguments: Sequence[str]) -> None:
    """End every process of this node's cluster; it is not an error when there is none."""
    unknown = [argument for argument in arguments if argument != "--now"]
    if unknown:
        raise SettingsError(
            f"sluice stop: {unknown[0]} is not known; the only option is --now, which does not wait for a run."
        )
    home = this_home()
    if not home.root.is_dir():
        print("No Sluice cluster runs here.")
        return
    with exclusive(home):
        check_not_used_elsewhere(home)
        state = known_cluster()
        was_running = bool(known_processes() or ray_processes(home))
        if state is not None and is_ray_healthy(state):
            _end_orderly(state, is_now="--now" in arguments)
        end_ray(home)
        end(family(process for record in known_processes().values() if (process := find(record))))
        cluster_path().unlink(missing_ok=True)
    print("Stopped." if was_running else "No Sluice cluster runs here.")
    defaults = StartOptions().to_remember()
    given = {name: value for name, value in (state.options if state else {}).items() if value != defaults.get(name)}
    if given:  # the next start does not remember them: its scorer, corpus and ports would be the default ones
        print(f"The same cluster again: {sluice_command()} start {format_options(given)}")


def _end_orderly(state: ClusterState, is_now: bool) -> None:
    """End the attached run and the servers; servers that do not answer end with Ray's other processes.

    Raises: ClusterInUse when the attached run is another machine's, or does not end.
    """
    try:
        with ray_connection(state):
            from deploy.cluster.attached_run import end_run, find_attached_run
            from deploy.cluster.fleet_client import stop_servers
            from deploy.cluster.keeper_client import forget_services

            run = find_attached_run(_ANSWER_S)
            if run is not None and is_now:
                print(f"Ending {run} at once: the steps after its last checkpoint are lost.", flush=True)
            elif run is not None:
                print(
                    f"Stopping {run} first: it ends after its step, with a checkpoint. "
                    "sluice stop --now does not wait for it.",
                    flush=True,
                )
                end_run(run)
            forget_services(list(known_processes()), _ANSWER_S)
            if is_head(state):  # other nodes' servers end with their nodes
                stop_servers(_STOP_SERVERS_S)
    except ClusterInUse:
        raise
    except OperatorError as error:
        print(f"{error} Its servers are ended with Ray.", file=sys.stderr)
