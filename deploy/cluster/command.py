"""`python -m deploy.cluster start | stop | status`: this node's part of a cluster.

Behind deploy/start_cluster.sh and deploy/stop_cluster.sh. Exit status: 0; 1 with one sentence; 2 for a wrong option.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deploy.cluster.home import Home, exclusive, make_home, this_home
from deploy.cluster.options import StartOptions, read_start_options
from deploy.cluster.processes import check_port, end, family, find
from deploy.cluster.ray_processes import await_ray, end_ray, is_running, launch_ray, ray_processes
from deploy.cluster.services import Service, await_healthy, is_healthy, wanted_services
from deploy.cluster.table import show_cluster, show_next_step
from protocol.errors import OperatorError
from protocol.node.home import ClusterState, ProcessRecord, cluster_path, read_cluster, write_cluster
from protocol.ray_calls import NAMESPACE

_FLEET_S = 60.0
_ANSWER_S = 10.0
_STOP_SERVERS_S = 60.0


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    verbs = {"start": _start, "stop": _stop, "status": _status}
    if not arguments or arguments[0] not in verbs:
        print(f"python -m deploy.cluster: give one of {', '.join(verbs)}.", file=sys.stderr)
        return 2
    try:
        verbs[arguments[0]](arguments[1:])
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _start(arguments: Sequence[str]) -> None:
    """Start what is missing, wait until it is healthy, show it. A start that fails leaves nothing behind."""
    options, home = read_start_options(arguments), this_home()
    with exclusive(home):
        make_home(home, is_joining=options.head is not None)
        known = _known_processes()
        state = _bring_up(options, home, known)
        _show(state, home)
    show_next_step()


def _bring_up(options: StartOptions, home: Home, known: dict[str, ProcessRecord]) -> ClusterState:
    wanted = wanted_services(options, home)
    kept = _keep_healthy(options, home, known, wanted)
    started: dict[str, ProcessRecord] = {}
    try:
        _check_ports(options, kept)
        ray_starting = None if "ray" in kept else launch_ray(options, home)
        if "reward" in wanted and "reward" not in kept:
            started["reward"] = wanted["reward"].launch(home)
        if options.corpus_path is None:
            _make_quickstart(home)
        if "retriever" not in kept:
            started["retriever"] = wanted["retriever"].launch(home)
        with ThreadPoolExecutor() as threads:
            waits = [
                threads.submit(await_healthy, record, home.token_file, options.start_timeout_s)
                for record in started.values()
            ]
            if ray_starting is not None:
                address = options.head or f"{options.node_ip}:{options.ray_port}"
                started["ray"] = await_ray(ray_starting, home, address, options.start_timeout_s)
            for wait in waits:
                wait.result()
        state = _state(options, home, {**kept, **started})
        _connect_environment(state)
        from deploy.cluster.fleet_client import connected, ensure_fleet

        with connected(state.ray_address):
            if options.head is None:
                ensure_fleet(_FLEET_S)
        write_cluster(state)
        return state
    except BaseException:  # Ctrl-C too: a half-started cluster would hold ports that nothing knows of
        end(family(process for record in started.values() if record.name != "ray" and (process := find(record))))
        if "ray" not in kept:
            end_ray(home)
        raise


def _stop(arguments: Sequence[str]) -> None:
    """End everything of this node's cluster; nothing running is fine."""
    if arguments:
        raise OperatorError(f"stop_cluster: {arguments[0]} is not known; it takes no options.")
    home = this_home()
    if not home.root.is_dir():
        print("No Sluice cluster runs here.")
        return
    with exclusive(home):
        known = _known_processes()
        was_running = bool(known or ray_processes(home))
        if "ray" in known and is_running(known["ray"]):
            _stop_servers()
        end_ray(home)
        end(family(process for record in known.values() if (process := find(record))))
        cluster_path().unlink(missing_ok=True)
    print("Stopped." if was_running else "No Sluice cluster runs here.")


def _status(arguments: Sequence[str]) -> None:
    """Show the table. Raises: OperatorError when no cluster runs, or when a part of it is down."""
    if arguments:
        raise OperatorError(f"status: {arguments[0]} is not known; it takes no options.")
    state = read_cluster()
    down = _show(state, this_home())
    if down:
        raise OperatorError(f"Down: {', '.join(down)}. Run deploy/start_cluster.sh again: it starts what is missing.")


def _show(state: ClusterState, home: Home) -> list[str]:
    """Print the table; returns the names of what is down."""
    health = [(record, _is_well(record, home)) for record in state.processes]
    servers: list[dict[str, Any]] = []
    if all(is_well for record, is_well in health if record.name == "ray"):
        _connect_environment(state)
        from deploy.cluster.fleet_client import connected, describe_servers

        with connected(state.ray_address):
            servers = describe_servers(_ANSWER_S)
    show_cluster(state, health, servers)
    return [record.name for record, is_well in health if not is_well]


def _stop_servers() -> None:
    """Have the rollout servers stop by themselves; one that cannot is ended with Ray's other processes."""
    state = read_cluster()
    _connect_environment(state)
    from deploy.cluster.fleet_client import connected, stop_servers

    try:
        with connected(state.ray_address):
            stop_servers(_STOP_SERVERS_S)
    except OperatorError as error:
        print(f"{error} Its servers are ended with Ray.", file=sys.stderr)


def _keep_healthy(
    options: StartOptions, home: Home, known: dict[str, ProcessRecord], wanted: dict[str, Service]
) -> dict[str, ProcessRecord]:
    """Return the processes that are healthy and as wanted now; the others of ours are ended, to be started afresh."""
    address = options.head or f"{options.node_ip}:{options.ray_port}"
    kept = {
        name: record
        for name, record in known.items()
        if (record.url == address if name == "ray" else name in wanted and wanted[name].is_in(record))
        and _is_well(record, home)
    }
    if "ray" not in kept:
        end_ray(home)
        make_home(home, is_joining=options.head is not None)
    end(family(process for name, record in known.items() if name not in kept and (process := find(record))))
    return kept


def _check_ports(options: StartOptions, kept: dict[str, ProcessRecord]) -> None:
    if "ray" not in kept and options.head is None:
        check_port("Ray head", options.node_ip, options.ray_port, "--ray-port")
    if "retriever" not in kept:
        check_port("retriever", "127.0.0.1", options.retriever_port, "--retriever-port")
    if options.reward_scorer is not None and "reward" not in kept:
        check_port("reward server", "127.0.0.1", options.reward_port, "--reward-port")


def _make_quickstart(home: Home) -> None:
    """Have the quick start's files be there; in a process of its own, which gives its memory back."""
    command = [sys.executable, "-m", "deploy.quickstart", "--out", str(home.quickstart)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own module
    if made.returncode:
        reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise OperatorError(f"The quick start's files could not be made in {home.quickstart}: {reason}")


def _state(options: StartOptions, home: Home, records: dict[str, ProcessRecord]) -> ClusterState:
    ray, retriever, reward = records["ray"], records["retriever"], records.get("reward")
    return ClusterState(
        ray_address=ray.url or "",
        namespace=NAMESPACE,
        node_ip=options.node_ip,
        retriever_url=retriever.url or "",
        reward_url=reward.url if reward else None,
        token_file=str(home.token_file),
        ray_token_file=str(home.ray_token_file),
        keys_dir=str(home.keys),
        processes=[ray, retriever, *([reward] if reward else [])],
    )


def _known_processes() -> dict[str, ProcessRecord]:
    """Return what cluster.json records, by name; nothing when there is none or it is of no use."""
    try:
        return {record.name: record for record in read_cluster().processes}
    except OperatorError:
        return {}


def _is_well(record: ProcessRecord, home: Home) -> bool:
    return is_running(record) if record.name == "ray" else is_healthy(record, home.token_file)


def _connect_environment(state: ClusterState) -> None:
    # Ray reads how to authenticate when it is first imported.
    os.environ |= state.ray_environment()
