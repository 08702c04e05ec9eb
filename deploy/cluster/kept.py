"""What of a cluster that runs stays through a start: what is healthy and as it is wanted now.

While a run is attached nothing that it uses is replaced: another option is refused, other code is kept until later.
"""

import shlex
import sys
from collections.abc import Mapping

from deploy.cluster.known import (
    RunStays,
    connect_environment,
    does_head_answer,
    is_head,
    is_ray_well,
    known_cluster,
    known_processes,
)
from deploy.cluster.node_ray.processes import end_ray, told_to_ray
from deploy.cluster.options.start_options import StartOptions
from deploy.cluster.wanted_services import Service
from deploy.node.home import Home, make_home
from deploy.node.processes import end, family, find
from deploy.node.service_health import is_healthy
from protocol.errors import OperatorError
from protocol.node.home import ClusterState, ProcessRecord

_ANSWER_S = 20.0


def find_kept(options: StartOptions, wanted: Mapping[str, Service], home: Home) -> dict[str, ProcessRecord]:
    """Return the processes that stay, by name: nothing when Ray goes, because the services' keeper goes with it.

    Raises: RunStays when a run uses what these options would replace.
    """
    state = known_cluster()
    if state is None or not is_ray_well(state) or is_left_behind(state):
        return {}
    records = {record.name: record for record in state.processes}
    other_options = [name for name, record in records.items() if _has_other_options(record, options, wanted)]
    other_code = [name for name in wanted if name in records and records[name].code != wanted[name].code]
    running = [name for name in (*other_options, *other_code) if find(records[name]) is not None]
    run = _attached_run(state) if running else None
    if run is not None and (replaced := [name for name in other_options if name in running]):
        raise RunStays(
            f"start_cluster: these options would replace {', '.join(replaced)}, which {run} uses. "
            f"Give the options it was started with ({as_given(state.options)}), or none, or wait until the run "
            "has ended."
        )
    if run is not None and other_code:
        print(
            f"Kept, although its code has changed: {', '.join(other_code)}, which {run} uses. "
            "Another deploy/start_cluster.sh after the run replaces it.",
            file=sys.stderr,
        )
        other_code = []
    if "ray" in other_options:
        return {}
    goes = {*other_options, *other_code}
    return {
        name: record
        for name, record in records.items()
        if name not in goes and (name == "ray" or is_healthy(record, home.token_file))
    }


def end_what_goes(kept: Mapping[str, ProcessRecord], options: StartOptions, home: Home) -> None:
    """End what ran and is not kept, and make the folders that went with it anew."""
    state = known_cluster()
    goes = [name for name in known_processes() if name not in kept]
    if "ray" not in kept:
        end_ray(home)
        make_home(home, is_joining=options.head is not None)
    elif goes and state is not None:
        connect_environment(state)
        from deploy.cluster.fleet_client import connected
        from deploy.cluster.keeper_client import forget_services

        with connected(state.ray_address, state.node_ip):
            forget_services(goes, _ANSWER_S)
    # Read again: until it was told, the keeper may have started one of them anew.
    known = known_processes()
    end(family(process for name in goes if name in known and (process := find(known[name]))))


def _has_other_options(record: ProcessRecord, options: StartOptions, wanted: Mapping[str, Service]) -> bool:
    if record.name == "ray":
        return record.url != options.ray_address or record.command != told_to_ray(options)
    return record.name not in wanted or record.command != wanted[record.name].command


def is_left_behind(state: ClusterState) -> bool:
    """Return whether this node's Ray belongs to an earlier head, in whose place another one answers now.

    It would end by itself after a minute without its head; to find out takes Ray as long. A head that does not answer
    at all may be back before.
    """
    if is_head(state) or not does_head_answer(state):
        return False
    connect_environment(state)
    from deploy.cluster.fleet_client import connected

    try:
        with connected(state.ray_address, state.node_ip):
            return False
    except OperatorError:
        return does_head_answer(state)


def _attached_run(state: ClusterState) -> str | None:
    """Return who uses the cluster, in words; None when nobody does."""
    connect_environment(state)
    from deploy.cluster.attached_run import find_attached_run
    from deploy.cluster.fleet_client import connected

    with connected(state.ray_address, state.node_ip):
        run = find_attached_run(_ANSWER_S)
    return None if run is None else str(run)


def as_given(options: Mapping[str, bool | str | int | None]) -> str:
    """Return remembered options as they would be typed; a flag that was not given is left out."""
    given = (
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}")
        for name, value in options.items()
        if value not in (None, False)
    )
    return " ".join(given)
