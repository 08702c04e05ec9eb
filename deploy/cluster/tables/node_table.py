"""Every node of the cluster in one table: whether it is ready, its servers, and how busy its machine and GPUs are."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.cluster.fleet_client import ask, describe_servers
from deploy.cluster.keeper_client import HEAD_RESOURCE
from deploy.node.machine import GpuLoad, MachineLoad
from protocol.errors import OperatorError
from protocol.node.drained import drained_nodes
from protocol.node.living import living_nodes
from protocol.ray_calls import NAMESPACE, keeper_of

_ANSWER_S = 10.0
_GIB = 1 << 30
NodeState = Literal["ready", "drained", "starting", "silent", "gone"]


@dataclass(frozen=True)
class NodeRow:
    """A node of the cluster."""

    address: str
    is_head: bool
    state: NodeState  # drained: ready, and given nothing; starting: without a keeper yet; silent: that does not answer
    num_servers: int  # rollout servers there
    num_gpus: float  # that Ray counts there
    load: MachineLoad | None  # None: its keeper told none


def node_rows() -> list[NodeRow]:
    """Return the nodes that live, and those that have gone and did not come back. Call it while connected."""
    nodes = ray.nodes()
    living = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in living_nodes()}
    answers = {node_id: _asked(node_id) for node_id in living}
    servers, drained = _servers_by_node(), drained_nodes()
    deadline = time.monotonic() + _ANSWER_S
    rows = {}
    for node in nodes:
        address, is_alive = str(node["NodeManagerAddress"]), str(node["NodeID"]) in living
        if is_alive or address not in living.values():
            state, load = _answered(answers[str(node["NodeID"])], deadline) if is_alive else ("gone", None)
            if state == "ready" and node["NodeID"] in drained:
                state = "drained"
            num_gpus = float(node["Resources"].get("GPU", 0))
            is_head = HEAD_RESOURCE in node["Resources"]
            rows[address] = NodeRow(address, is_head, state, servers[address], num_gpus, load)
    return sorted(rows.values(), key=lambda row: (not row.is_head, row.address))


def show_nodes(rows: Sequence[NodeRow]) -> None:
    """Print one row for each node, and under them their sum."""
    table = Table(title="Nodes of the cluster", title_justify="left")
    for column in ("node", "state", "servers", "load / cores", "memory GiB", "GPUs", "GPU memory GiB", "GPU busy"):
        table.add_column(column, overflow="fold")
    for row in rows:
        colour = "green" if row.state == "ready" else "red"
        name = f"{row.address} (head)" if row.is_head else row.address
        table.add_row(name, Text(row.state, colour), str(row.num_servers), *_of_machine(row))
    Console(markup=False, emoji=False).print(table)
    here = [row for row in rows if row.state != "gone"]
    gpus = sum(row.num_gpus for row in here)
    print(f"In all: nodes {len(here)}, GPUs {gpus:g}, rollout servers {sum(row.num_servers for row in here)}.")


def _asked(node_id: str) -> Any:
    """Return a reference to the answer of a node's keeper; None when there is none yet."""
    try:
        return ray.get_actor(keeper_of(node_id), namespace=NAMESPACE).load.remote()
    except ValueError:
        return None


def _answered(reference: Any, deadline: float) -> tuple[NodeState, MachineLoad | None]:
    """deadline: monotonic seconds, the same for all nodes."""
    if reference is None:
        return "starting", None
    try:
        load: MachineLoad = ask(reference, max(deadline - time.monotonic(), 0.0), "keeper")
    except OperatorError:
        return "silent", None
    return "ready", load


def _servers_by_node() -> Counter[str]:
    """Return how many rollout servers each address has; none for all while the fleet is busy starting some."""
    try:
        return Counter(str(server["node_ip"]) for server in describe_servers(_ANSWER_S) if server["is_alive"])
    except OperatorError:
        return Counter()


def _of_machine(row: NodeRow) -> tuple[str, ...]:
    load = row.load
    if load is None:
        return ("", "", f"{row.num_gpus:g}", "", "")
    return (
        f"{load['load']:.1f} / {load['num_cores']}",
        f"{load['used_bytes'] / _GIB:.1f} of {load['total_bytes'] / _GIB:.1f}",
        _cards(row.num_gpus, load["gpus"]),
        ", ".join(f"{gpu['used_bytes'] / _GIB:.0f} of {gpu['total_bytes'] / _GIB:.0f}" for gpu in load["gpus"]),
        ", ".join(f"{gpu['busy_percent']} %" for gpu in load["gpus"]),
    )


def _cards(num_gpus: float, gpus: Sequence[GpuLoad]) -> str:
    """Return what Ray counts, and the cards that the driver sees."""
    cards = Counter(gpu["name"] for gpu in gpus)
    seen = ", ".join(f"{number} {name}" for name, number in cards.items())
    return f"{num_gpus:g} ({seen})" if seen else f"{num_gpus:g}"
