"""`deploy.cluster start`: starts what is missing of this node's part of a cluster, and shows it.

Order: what runs already and stays, Ray and services side by side, the fleet, the keeper, the table.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from deploy.cluster.checkout import check_same, tell_checkout, this_checkout, told_checkout
from deploy.cluster.foreground import BLOCK, start_and_stay
from deploy.cluster.join_file import is_reachable, read_join_file, take_secrets, write_join_file
from deploy.cluster.joining import check_clock, check_is_not_head, check_same_kind, check_way_back, check_way_to_head
from deploy.cluster.kept import end_what_goes, find_kept
from deploy.cluster.known import connect_environment, is_head, known_cluster
from deploy.cluster.node_ray.processes import await_ray, end_ray, launch_ray
from deploy.cluster.options.port_range import read_port_range
from deploy.cluster.options.start_options import LOOPBACK, StartOptions, read_start_options
from deploy.cluster.tables.show import show_cluster
from deploy.cluster.tables.table import show_how_to_join, show_next_step
from deploy.cluster.wanted_services import Service, shared_retriever_url, wanted_services
from deploy.node.home import Home, check_held_by_none_other, exclusive, make_home, this_home
from deploy.node.processes import MARK, check_port, end, family, find
from deploy.node.service_health import await_healthy
from protocol import ports
from protocol.errors import OperatorError
from protocol.node.home import ClusterState, ProcessRecord, write_cluster
from protocol.ray_calls import FLEET, NAMESPACE

_FLEET_S = 60.0
_ANY_PORT = 0
_LISTENERS = ("ray", "retriever", "reward", "dashboard")


def start(arguments: Sequence[str]) -> None:
    """Start what is missing, wait until it is healthy, show it. A start that fails leaves nothing of its own behind.

    Raises: OperatorError when something is down in the end, or when a run uses what would have to be replaced.
    """
    if BLOCK in arguments and not set(arguments) & {"-h", "--help"}:
        start_and_stay(arguments)
        return
    known = known_cluster()
    options, home = read_start_options(arguments, known.options if known is not None else None), this_home()
    os.environ[ports.VARIABLE] = options.ports.ours if options.ports is not None else ""
    with exclusive(home):
        check_held_by_none_other(home)
        check_is_not_head(options.head, known)
        if options.join is not None:
            told = read_join_file(options.join)
            check_same(told, "the join file", ", and copy its new join file")
            take_secrets(told, home)
        make_home(home, is_joining=options.head is not None)
        wanted = wanted_services(options, home)
        kept = find_kept(options, wanted, home)
        if known is not None:
            _check_ports(options, kept, known)  # before anything ends that works
        end_what_goes(kept, options, home)
        state = _bring_up(options, home, wanted, kept)
        down = show_cluster(state, home)
    if options.head is not None and FLEET in down:
        down.remove(FLEET)  # the head's: busy with a run that has begun before this node came
    if down:
        raise OperatorError(f"Down: {', '.join(down)}. Its log says why; deploy/start_cluster.sh tries again.")
    if options.head is None and is_reachable(options.node_ip):
        show_how_to_join(write_join_file(home, options.ray_address))
    if options.wait_nodes:
        _await_nodes(state, options)
    show_next_step()


def _await_nodes(state: ClusterState, options: StartOptions) -> None:
    connect_environment(state)
    from deploy.cluster.fleet_client import connected
    from deploy.cluster.nodes import await_nodes

    with connected(state.ray_address, state.node_ip):
        await_nodes(options.wait_nodes, options.start_timeout_s)


def _bring_up(
    options: StartOptions, home: Home, wanted: dict[str, Service], kept: dict[str, ProcessRecord]
) -> ClusterState:
    """Start what is not kept. Returns the cluster as cluster.json has it then."""
    started: dict[str, ProcessRecord] = {}
    try:
        if options.head is not None and "ray" not in kept:
            check_way_to_head(options.head)
        _check_ports(options, kept)
        _start_processes(options, home, wanted, kept, started)
        state = _state(options, home, {**kept, **started})
        _have_kept(state, home)
        return known_cluster() or state
    except BaseException:  # Ctrl-C too: a half-started cluster would hold ports that nothing knows of
        end(family(process for record in started.values() if record.name != "ray" and (process := find(record))))
        if "ray" not in kept:
            end_ray(home)
        raise


def _start_processes(
    options: StartOptions,
    home: Home,
    wanted: dict[str, Service],
    kept: dict[str, ProcessRecord],
    started: dict[str, ProcessRecord],
) -> None:
    """Start Ray and services side by side; returns when all are healthy. started: filled as they come."""
    ray_starting = launch_ray(options, home) if "ray" not in kept else None
    if "reward" in wanted and "reward" not in kept:
        started["reward"] = wanted["reward"].launch(home)
    if options.corpus_path is None:
        _make_quickstart(home)
    if "retriever" not in kept:
        started["retriever"] = wanted["retriever"].launch(home)
    threads = ThreadPoolExecutor()
    try:
        waits = [
            threads.submit(await_healthy, record, home.token_file, options.start_timeout_s)
            for record in started.values()
        ]
        if ray_starting is not None:
            started["ray"] = await_ray(ray_starting, home, options)
        for wait in waits:
            wait.result()
    finally:
        threads.shutdown(wait=False)  # where the start fails, a service may be minutes from well, and is ended


def _have_kept(state: ClusterState, home: Home) -> None:
    """Write cluster.json, and have the fleet and this node's keeper run."""
    connect_environment(state)
    from deploy.cluster.fleet_client import connected, ensure_fleet
    from deploy.cluster.keeper_client import keep_services

    with connected(state.ray_address, state.node_ip):
        if not is_head(state):
            _check_join(state)
        write_cluster(state)  # from which the keeper knows what to keep
        if is_head(state):
            tell_checkout(this_checkout())
            ensure_fleet(_FLEET_S)
        keep_services(home, _FLEET_S)


def _check_join(state: ClusterState) -> None:
    """Ask the head what it runs, whether it reaches this node, and what time it is.

    Raises: OperatorError saying what is wrong.
    """
    from deploy.cluster.fleet_client import ask
    from deploy.cluster.keeper_client import head_keeper

    head_ip, keeper = head_keeper(_FLEET_S)
    check_same_kind(state.node_ip, head_ip)
    if (told := told_checkout()) is not None:
        check_same(told, "Ray")
    check_way_back(
        state.node_ip, lambda host, port: str(ask(keeper.reach.remote(host, port), _FLEET_S, "head's keeper"))
    )
    check_clock(lambda: float(ask(keeper.clock.remote(), _FLEET_S, "head's keeper")))


def _check_ports(options: StartOptions, kept: Mapping[str, ProcessRecord], known: ClusterState | None = None) -> None:
    """Raise OperatorError for an address that is not this machine's, or a port that is taken.

    known: of what still runs; its own ports are not looked at, since some of it goes.
    """
    if "ray" not in kept:
        check_port("cluster", options.node_ip, _ANY_PORT, "--node-ip")
    for service, host, port, flag in _ports(options, kept):
        if known is None or not _has_port(known, port):
            check_port(service, host, port, flag)


def _ports(options: StartOptions, kept: Mapping[str, ProcessRecord]) -> Iterator[tuple[str, str, int, str]]:
    """Yield of each port that what starts will listen on: by whom, at which address, and the option for it."""
    if "ray" not in kept and options.head is None:
        yield "Ray head", options.node_ip, options.ray_port, "--ray-port"
        if options.dashboard_port is not None:
            yield "Ray's dashboard", options.dashboard_host or LOOPBACK, options.dashboard_port, "--dashboard-port"
    if "ray" not in kept and options.ports is not None:
        for flag, port in options.ports.for_ray.items():
            if "worker" not in flag:
                yield f"{flag.removeprefix('--').removesuffix('-port')} of Ray", options.node_ip, port, "--ports"
    if "retriever" not in kept:
        for host in [LOOPBACK, *([options.node_ip] if shared_retriever_url(options) else [])]:
            yield "retriever", host, options.retriever_port, "--retriever-port"
    if options.reward_scorer is not None and "reward" not in kept:
        yield "reward server", LOOPBACK, options.reward_port, "--reward-port"


def _has_port(known: ClusterState, port: int) -> bool:
    """Return whether a cluster was started with this port among its own."""
    ports_of_its_own, given = [known.options.get(f"{name}_port") for name in _LISTENERS], known.options.get("ports")
    return port in ports_of_its_own or (isinstance(given, str) and port in read_port_range(given))


def _make_quickstart(home: Home) -> None:
    """Have the quick start's files be there; in a process of its own, which gives its memory back."""
    command = [sys.executable, "-m", "deploy.quickstart", "--out", str(home.quickstart)]
    environment = {**os.environ, MARK: str(home.ray_folder)}  # so that a stop ends it, whose start was killed
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603  # ours
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
        shared_retriever_url=shared_retriever_url(options),
        reward_url=reward.url if reward else None,
        token_file=str(home.token_file),
        ray_token_file=str(home.ray_token_file),
        keys_dir=str(home.keys),
        processes=[ray, retriever, *([reward] if reward else [])],
        options=options.to_remember(),
    )
