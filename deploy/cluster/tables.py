"""The tables of `deploy.cluster`: this node's processes, and every node of the cluster."""

import json
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.cluster.known import is_ray_healthy, ray_connection
from deploy.node.home import Home
from deploy.node.keeper import ServiceInfo
from deploy.node.service import is_healthy
from protocol.errors import OperatorError
from protocol.node.home import ClusterState, ProcessRecord
from protocol.node.identity import sluice_command
from protocol.ray_calls import FLEET, keeper_of, living_nodes

_ANSWER_S = 10.0
NodeState = Literal["ready", "starting", "silent", "gone"]


@dataclass(frozen=True)
class Row:
    """A process of this node's cluster."""

    name: str
    is_up: bool  # False: shown in red
    state: str  # healthy, warm or down; for a service also its number of restarts
    where: str  # URL, or address of its node
    pid: int  # 0: no process
    log: str  # path of its log
    trouble: str = ""  # reason why it is not healthy


@dataclass(frozen=True)
class NodeRow:
    """A node of the cluster."""

    address: str
    is_head: bool
    state: NodeState  # starting: without a keeper; silent: no answer
    num_servers: int
    num_gpus: float  # GPUs that Ray counts there


def show_cluster(state: ClusterState, home: Home, *, as_json: bool = False) -> list[str]:
    """Print the table of this node's processes, or one JSON object; returns the names of those that are down."""
    rows = cluster_rows(state, home)
    if as_json:
        print(json.dumps({"node_ip": state.node_ip, "processes": [asdict(row) for row in rows]}))
    else:
        show_rows(f"Sluice on {state.node_ip}", rows)
    return [row.name for row in rows if not row.is_up]


def cluster_rows(state: ClusterState, home: Home) -> list[Row]:
    """Return a row for Ray, each service of this node, each rollout server, and what else does not answer."""
    ray = next(record for record in state.processes if record.name == "ray")
    is_up = is_ray_healthy(state)
    rows = [Row(ray.name, is_up, "healthy" if is_up else "down", ray.url or "", ray.pid, ray.log)]
    services: dict[str, ServiceInfo] | None = None
    servers: list[Row] = []
    if is_up:
        with ray_connection(state):
            from deploy.cluster.fleet_client import describe_servers
            from deploy.cluster.keeper_client import describe_services

            services = describe_services(_ANSWER_S)
            try:
                servers = [server_row(server) for server in describe_servers(_ANSWER_S)]
            except OperatorError:  # it may be starting servers for a run
                rows.append(Row(FLEET, False, f"no answer within {_ANSWER_S:g} s", "", 0, ray.log))
    rows += [_service_row(record, services or {}, home) for record in state.processes if record.name != "ray"]
    if is_up and services is None:
        rows.append(Row("keeper", False, "down", "", 0, str(home.logs / "keeper.log")))
    return rows + servers


def server_row(server: Mapping[str, Any]) -> Row:
    """Return the row of a rollout server. server: its description by the fleet."""
    state = "warm" if server["is_alive"] else "down"
    return Row(server["name"], server["is_alive"], state, server["node_ip"], server["pid"], server["log"])


def show_rows(title: str, rows: Sequence[Row]) -> None:
    """Print one row for each process, then their logs: a path stays on one line in a narrow terminal too."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "state", "where", "pid"):
        table.add_column(column, overflow="fold")
    for row in rows:
        colour = "green" if row.is_up else "red"
        table.add_row(row.name, Text(row.state, colour), row.where, str(row.pid))
    Console(markup=False, emoji=False).print(table)
    for row in rows:
        if row.trouble:
            print(f"{row.name}: {row.trouble}")
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:<{width}}  {row.log}")


def show_how_to_join(join_file: Path) -> None:
    """Print the command by which another machine joins this cluster."""
    command = f"sluice start --join {shlex.quote(str(join_file))}"
    print(f"Other nodes join with: {command}   (copy it there, or share its disk)")


def show_next_step() -> None:
    """Print the command that uses a running cluster."""
    print(f"Next: {sluice_command()} run   ({sluice_command()} stop ends everything)")


def node_rows() -> list[NodeRow]:
    """Return the living nodes, and those that left and did not come back. Call it while connected."""
    import ray

    from deploy.cluster.keeper_client import HEAD_RESOURCE

    living = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in living_nodes()}
    answers = {node_id: _ask_keeper(node_id) for node_id in living}
    servers = _servers_by_node()
    deadline = time.monotonic() + _ANSWER_S
    rows = {}
    for node in ray.nodes():
        node_id, address = str(node["NodeID"]), str(node["NodeManagerAddress"])
        if node_id in living or address not in living.values():
            state = _state_of(answers[node_id], deadline) if node_id in living else "gone"
            num_gpus = float(node["Resources"].get("GPU", 0))
            is_head = HEAD_RESOURCE in node["Resources"]
            rows[address] = NodeRow(address, is_head, state, servers[address], num_gpus)
    return sorted(rows.values(), key=lambda row: (not row.is_head, row.address))


def show_nodes(rows: Sequence[NodeRow]) -> None:
    """Print one row for each node, then their sums."""
    table = Table(title="Nodes of the cluster", title_justify="left")
    for column in ("node", "state", "servers", "GPUs"):
        table.add_column(column, overflow="fold")
    for row in rows:
        colour = "green" if row.state == "ready" else "red"
        name = f"{row.address} (head)" if row.is_head else row.address
        table.add_row(name, Text(row.state, colour), str(row.num_servers), f"{row.num_gpus:g}")
    Console(markup=False, emoji=False).print(table)
    here = [row for row in rows if row.state != "gone"]
    gpus = sum(row.num_gpus for row in here)
    print(f"In all: nodes {len(here)}, GPUs {gpus:g}, rollout servers {sum(row.num_servers for row in here)}.")


def _service_row(record: ProcessRecord, services: dict[str, ServiceInfo], home: Home) -> Row:
    is_up, known = is_healthy(record, home.token_file), services.get(record.name)
    state = "healthy" if is_up else "down"
    if known is not None and known["num_restarts"]:
        state += f", restarted {known['num_restarts']} times" if known["num_restarts"] > 1 else ", restarted once"
    trouble = known["trouble"] if known is not None and not is_up else ""
    return Row(record.name, is_up, state, record.url or "", record.pid, record.log, trouble)


def _ask_keeper(node_id: str) -> Any:
    """Return a reference to an answer of a node's keeper; None when the node has no keeper yet."""
    from deploy.cluster.fleet_client import find_actor

    keeper = find_actor(keeper_of(node_id))
    return None if keeper is None else keeper.clock.remote()


def _state_of(reference: Any, deadline: float) -> NodeState:
    """Return a node's state by its keeper's answer. deadline: monotonic seconds, one for all nodes."""
    from deploy.cluster.fleet_client import ask

    if reference is None:
        return "starting"
    try:
        ask(reference, max(deadline - time.monotonic(), 0.0), "keeper")
    except OperatorError:
        return "silent"
    return "ready"


def _servers_by_node() -> Counter[str]:
    """Return the number of rollout servers by address; empty while the fleet is busy."""
    from deploy.cluster.fleet_client import describe_servers

    try:
        return Counter(str(server["node_ip"]) for server in describe_servers(_ANSWER_S) if server["is_alive"])
    except OperatorError:
        return Counter()
