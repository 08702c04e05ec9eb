"""`deploy.cluster start`: starts the missing parts of this node's cluster, and shows them.

Order: processes to keep, Ray and services in parallel, the fleet, the keeper, the table.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from deploy.cluster.foreground import BLOCK, start_and_stay
from deploy.cluster.joining import (
    check_clock,
    check_head_is_reachable,
    check_is_not_head,
    check_reachable_from_head,
    check_same_as_head,
    check_same_ip_family,
    head_checkout,
    install_secrets,
    is_reachable,
    publish_checkout,
    read_join_file,
    this_checkout,
    write_join_file,
)
from deploy.cluster.known import is_head, known_cluster, ray_connection
from deploy.cluster.options import LOOPBACK, StartOptions, read_port_range, read_start_options
from deploy.cluster.ray_processes import await_ray, end_ray, launch_ray
from deploy.cluster.reuse import end_replaced, find_reusable
from deploy.cluster.services import Service, services_of, shared_retriever_url
from deploy.cluster.tables import show_cluster, show_how_to_join, show_next_step
from deploy.node.home import Home, check_not_used_elsewhere, exclusive, make_home, this_home
from deploy.node.processes import MARK, allow_many_files, check_port, end, family, find
from deploy.node.service import await_healthy
from protocol.addresses import PORTS_VARIABLE, with_port
from protocol.errors import OperatorError
from protocol.node.home import ClusterState, ProcessRecord, write_cluster
from protocol.ray_calls import FLEET, NAMESPACE, SERVER_PREFIX

_FLEET_S = 60.0
_ANY_PORT = 0
_LISTENERS = ("ray", "retriever", "reward", "dashboard")


def start(arguments: Sequence[str]) -> None:
    """Start the missing parts, wait until they are healthy, show them. A failed start ends everything it started.

    Raises: OperatorError when a part is down in the end, or when a run uses a process that would be replaced.
    """
    if BLOCK in arguments and not set(arguments) & {"-h", "--help"}:
        start_and_stay(arguments)
        return
    os.umask(os.umask(0o022) | 0o002)  # other users may never write a cluster's files
    allow_many_files()
    known = known_cluster()
    options, home = read_start_options(arguments, known.options if known is not None else None), this_home()
    os.environ[PORTS_VARIABLE] = options.ports.ours if options.ports is not None else ""
    with exclusive(home):
        check_not_used_elsewhere(home)
        check_is_not_head(options.address, known)
        if options.join is not None:
            head = read_join_file(options.join)
            check_same_as_head(head, "the join file", ", and copy its new join file")
            install_secrets(head, home)
        make_home(home, is_joining=options.address is not None)
        wanted = services_of(options, home)
        kept = find_reusable(options, wanted, home)
        if known is not None:
            _check_ports(options, kept, known)  # before any healthy process ends
        end_replaced(kept, options, home)
        state = _NodeStart(options, home, wanted, kept).run()
        # The fleet restarts its servers; this node may start while another node's server is silent.
        down = [name for name in show_cluster(state, home) if not name.startswith(SERVER_PREFIX)]
    if options.address is not None and FLEET in down:
        down.remove(FLEET)  # the head's fleet is busy with a run that began earlier
    if down:
        raise OperatorError(f"Down: {', '.join(down)}. Its log says why; sluice start tries again.")
    if options.address is None and is_reachable(options.node_ip):
        show_how_to_join(write_join_file(home, options.ray_address))
    if options.dashboard_port is not None:
        url = f"http://{with_port(options.dashboard_host or LOOPBACK, options.dashboard_port)}"
        print(f"Ray's dashboard: {url}   (its token: {state.ray_token_file})")
    if options.wait_nodes:
        with ray_connection(state):
            from deploy.cluster.keeper_client import await_nodes

            await_nodes(options.wait_nodes, options.start_timeout_s)
    show_next_step()


@dataclass
class _NodeStart:
    """One start of the processes that are not kept."""

    options: StartOptions
    home: Home
    wanted: Mapping[str, Service]  # by name
    kept: Mapping[str, ProcessRecord]  # processes that already run and stay
    started: dict[str, ProcessRecord] = field(default_factory=dict)

    def run(self) -> ClusterState:
        """Start everything; returns the content of cluster.json. After an error nothing of this start remains."""
        try:
            if self.options.address is not None and "ray" not in self.kept:
                check_head_is_reachable(self.options.address)
            _check_ports(self.options, self.kept)
            self._start_processes()
            state = self._state()
            _start_actors(state, self.home)
            return known_cluster() or state
        except BaseException:  # Ctrl-C too: a half-started cluster would hold ports unnoticed
            records = [record for name, record in self.started.items() if name != "ray"]
            end(family(process for record in records if (process := find(record))))
            if "ray" not in self.kept:
                end_ray(self.home)
            raise

    def _start_processes(self) -> None:
        """Start Ray and the services in parallel; returns when all are healthy."""
        ray = launch_ray(self.options, self.home) if "ray" not in self.kept else None
        if "reward" in self.wanted and "reward" not in self.kept:
            self.started["reward"] = self.wanted["reward"].launch(self.home)
        if self.options.corpus_path is None:
            _make_quickstart(self.home)
        if "retriever" not in self.kept:
            self.started["retriever"] = self.wanted["retriever"].launch(self.home)
        threads = ThreadPoolExecutor()
        try:
            token, timeout_s = self.home.token_file, self.options.start_timeout_s
            waits = [threads.submit(await_healthy, record, token, timeout_s) for record in self.started.values()]
            if ray is not None:
                self.started["ray"] = await_ray(ray, self.home, self.options)
            for wait in waits:
                wait.result()
        finally:
            threads.shutdown(wait=False)  # after an error the services are ended at once

    def _state(self) -> ClusterState:
        records = {**self.kept, **self.started}
        ray, retriever, reward = records["ray"], records["retriever"], records.get("reward")
        return ClusterState(
            ray_address=ray.url or "",
            namespace=NAMESPACE,
            node_ip=self.options.node_ip,
            retriever_url=retriever.url or "",
            shared_retriever_url=shared_retriever_url(self.options),
            reward_url=reward.url if reward else None,
            token_file=str(self.home.token_file),
            ray_token_file=str(self.home.ray_token_file),
            keys_dir=str(self.home.keys),
            processes=[ray, retriever, *([reward] if reward else [])],
            options=self.options.to_remember(),
        )


def _start_actors(state: ClusterState, home: Home) -> None:
    """Write cluster.json, and start the fleet and this node's keeper. A node that joins is checked first."""
    with ray_connection(state):
        from deploy.cluster.fleet_client import ensure_fleet
        from deploy.cluster.keeper_client import keep_services

        if not is_head(state):
            _check_join(state)
        write_cluster(state)  # the keeper reads its services there
        if is_head(state):
            publish_checkout(this_checkout())
            ensure_fleet(_FLEET_S)
        keep_services(home, _FLEET_S)


def _check_join(state: ClusterState) -> None:
    """Compare this node with its head. Raises: OperatorError naming the difference."""
    from deploy.cluster.fleet_client import ask
    from deploy.cluster.keeper_client import head_keeper

    head_ip, keeper = head_keeper(_FLEET_S)
    check_same_ip_family(state.node_ip, head_ip)
    if (head := head_checkout()) is not None:
        check_same_as_head(head, "Ray")
    check_reachable_from_head(
        state.node_ip, lambda host, port: str(ask(keeper.reach.remote(host, port), _FLEET_S, "head's keeper"))
    )
    check_clock(lambda: float(ask(keeper.clock.remote(), _FLEET_S, "head's keeper")))


def _check_ports(options: StartOptions, kept: Mapping[str, ProcessRecord], known: ClusterState | None = None) -> None:
    """Raise OperatorError for another machine's address, or for all ports in use.

    known: the cluster that still runs; its own ports are not checked, because some of its processes will end.
    """
    if "ray" not in kept:
        check_port("cluster", options.node_ip, _ANY_PORT, "--node-ip")
    problems = []
    for service, host, port, flag in _listeners(options, kept):
        if known is None or not _has_port(known, port):
            try:
                check_port(service, host, port, flag)
            except OperatorError as error:
                problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        listed = "".join(f"\n- {problem}" for problem in problems)
        raise OperatorError(
            f"{len(problems)} ports cannot be used; --ports FIRST-LAST, such as 20000-20999, moves all:{listed}"
        )


def _listeners(options: StartOptions, kept: Mapping[str, ProcessRecord]) -> Iterator[tuple[str, str, int, str]]:
    """Yield (service, address, port, its option) for each port that this start will use."""
    if "ray" not in kept and options.address is None:
        yield "Ray head", options.node_ip, options.ray_port, "--ray-port"
        if options.dashboard_port is not None:
            yield "Ray's dashboard", options.dashboard_host or LOOPBACK, options.dashboard_port, "--dashboard-port"
    if "ray" not in kept and options.ports is not None:
        for flag, port in options.ports.ray_flags.items():
            if "worker" not in flag:
                yield f"{flag.removeprefix('--').removesuffix('-port')} of Ray", options.node_ip, port, "--ports"
    if "retriever" not in kept:
        for host in [LOOPBACK, *([options.node_ip] if shared_retriever_url(options) else [])]:
            yield "retriever", host, options.retriever_port, "--retriever-port"
    if not options.no_reward and "reward" not in kept:
        yield "reward server", LOOPBACK, options.reward_port, "--reward-port"


def _has_port(known: ClusterState, port: int) -> bool:
    """Return whether the port is one of a running cluster's own."""
    own, given = [known.options.get(f"{name}_port") for name in _LISTENERS], known.options.get("ports")
    return port in own or (isinstance(given, str) and port in read_port_range(given))


def _make_quickstart(home: Home) -> None:
    """Make the quick start's files, in a process of its own, whose memory is freed."""
    # -P: the working folder may hold a deploy/ of the user.
    command = [sys.executable, "-P", "-m", "deploy.quickstart", "--out", str(home.quickstart)]
    environment = {**os.environ, MARK: str(home.ray_folder)}  # a stop finds the process by this mark
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603  # ours
    if made.returncode:
        reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise OperatorError(f"The quick start's files could not be made in {home.quickstart}: {reason}")
