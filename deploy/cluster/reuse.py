"""The processes of a running cluster that a start keeps: healthy ones with the same options and code.

While a run is attached no process that it uses is replaced: other options are refused, and other code waits for the
next start.
"""

import shlex
import sys
from collections.abc import Mapping

from deploy.cluster.known import ClusterInUse, is_ray_healthy, known_cluster, known_processes, ray_connection
from deploy.cluster.options import StartOptions
from deploy.cluster.ray_processes import end_ray, ray_flags
from deploy.cluster.services import Service
from deploy.node.home import Home, make_home
from deploy.node.processes import end, family, find
from deploy.node.service import is_healthy
from protocol.node.home import ClusterState, ProcessRecord

_ANSWER_S = 20.0


def find_reusable(options: StartOptions, wanted: Mapping[str, Service], home: Home) -> dict[str, ProcessRecord]:
    """Return the processes to keep, by name. Empty when Ray is to be replaced: the services' keeper ends with Ray.

    Raises: ClusterInUse when these options would replace a process that a run uses.
    """
    state = known_cluster()
    if state is None or not is_ray_healthy(state):
        return {}
    records = {record.name: record for record in state.processes}
    other_options = [name for name, record in records.items() if _has_other_options(record, options, wanted)]
    other_code = [name for name in wanted if name in records and records[name].code != wanted[name].code]
    running = [name for name in (*other_options, *other_code) if find(records[name]) is not None]
    run = _attached_run(state) if running else None
    if run is not None and (replaced := [name for name in other_options if name in running]):
        raise ClusterInUse(
            f"sluice start: these options would replace {', '.join(replaced)}, which {run} uses. "
            f"Give the options of the earlier start ({format_options(state.options)}), or none, or wait until the run "
            "has ended."
        )
    if run is not None and other_code:
        print(
            f"Kept, although its code has changed: {', '.join(other_code)}, which {run} uses. "
            "Another sluice start after the run replaces it.",
            file=sys.stderr,
        )
        other_code = []
    if "ray" in other_options:
        return {}
    replaced = [*other_options, *other_code]
    return {
        name: record
        for name, record in records.items()
        if name not in replaced and (name == "ray" or is_healthy(record, home.token_file))
    }


def end_replaced(kept: Mapping[str, ProcessRecord], options: StartOptions, home: Home) -> None:
    """End every process of the cluster that is not kept. When Ray ends, its folders are made again."""
    state = known_cluster()
    replaced = [name for name in known_processes() if name not in kept]
    if "ray" not in kept:
        end_ray(home)
        make_home(home, is_joining=options.address is not None)
    elif replaced and state is not None:
        with ray_connection(state):
            from deploy.cluster.keeper_client import forget_services

            forget_services(replaced, _ANSWER_S)
    # Read again: the keeper may have restarted a service just before it forgot it.
    known = known_processes()
    end(family(process for name in replaced if name in known and (process := find(known[name]))))


def format_options(options: Mapping[str, bool | str | int | None]) -> str:
    """Return remembered options as a command line."""
    given = (
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}")
        for name, value in options.items()
        if value not in (None, False)
    )
    return " ".join(given)


def _has_other_options(record: ProcessRecord, options: StartOptions, wanted: Mapping[str, Service]) -> bool:
    if record.name == "ray":
        return record.url != options.ray_address or record.command != ray_flags(options)
    return record.name not in wanted or record.command != wanted[record.name].command


def _attached_run(state: ClusterState) -> str | None:
    """Return the run that uses the cluster, in words; None when there is none."""
    with ray_connection(state):
        from deploy.cluster.attached_run import find_attached_run

        run = find_attached_run(_ANSWER_S)
    return None if run is None else str(run)
