"""The printed plan: node, GPUs and memory of each process."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from learner.plan.assign import gpus_of
from learner.plan.processes import Node, Processes, Topology
from protocol.settings.placement import servers_on_gpu

_WHERE = {"here": "this node", "packed": "packed", "spread": "spread over nodes"}
_GB = 1e9


def show_plan(topology: Topology, title: str, facts: Sequence[str]) -> None:
    """Print the plan by role, by node where nodes are known, and then further facts."""
    table = Table("process", "how many", "GPUs each", "memory each", "where", title=title)
    for processes in (topology.coordinator, topology.ranks, topology.servers):
        if processes.count:
            table.add_row(*_role_row(processes, is_placed=bool(topology.nodes)))
    console = Console(markup=False, emoji=False)  # names and paths are the user's, in brackets too
    console.print(table)
    if topology.nodes:
        console.print(_node_table(topology))
        console.print(_totals(topology), soft_wrap=True)
        if topology.shares_devices:
            console.print(_turns(topology), soft_wrap=True)
        for words in _notices(topology):
            console.print(words, soft_wrap=True)
    else:
        console.print(
            "No Sluice cluster runs here: GPUs are as in the settings, and 0 on a cluster without GPUs.", soft_wrap=True
        )
    for fact in facts:
        console.print(fact, soft_wrap=True)


def plan_as_json(topology: Topology, title: str, facts: Sequence[str]) -> str:
    """Return the same as one JSON object; memory in bytes of each process."""
    processes = [
        {
            "role": each.role,
            "count": each.count,
            "gpus_each": each.num_gpus,
            "memory_bytes": each.memory_bytes,
            "host_bytes": each.host_bytes,
            "push_bytes": each.push_bytes,
            "nodes": [node.node_ip for node in each.places],
        }
        for each in (topology.coordinator, topology.ranks, topology.servers)
    ]
    nodes = [{"name": node.node_ip, "gpus": node.num_gpus, "gpu_bytes": node.gpu_bytes} for node in topology.nodes]
    facts = [*_notices(topology), *facts]
    return json.dumps({"run": title, "processes": processes, "nodes": nodes, "facts": facts})


def _notices(topology: Topology) -> list[str]:
    notices = (describe_loading, describe_push, tight_words, describe_crowded)
    return [words for notice in notices if (words := notice(topology))]


def node_rows(topology: Topology) -> list[tuple[str, str, str, str, str]]:
    """Return each node's name, used GPUs, ranks, servers, and memory of each GPU in GB."""
    return [
        (
            node.node_ip,
            f"{_gpus_taken(topology, node)} of {node.num_gpus}",
            _numbers(topology.ranks, node),
            _numbers(topology.servers, node),
            _on_card(topology, node),
        )
        for node in topology.nodes
    ]


def tight_words(topology: Topology) -> str:
    """Return a warning when a rank may run out of GPU memory in a full micro-batch; "" when none may.

    Permanent memory above a GPU's is refused earlier, by `shortages.gpu_memory_shortages`.
    """
    ranks = topology.ranks
    for node in ranks.places if ranks.num_gpus else ():
        if node.gpu_bytes is not None and ranks.memory_bytes > node.gpu_bytes:
            return (
                "A rank may run out of memory: with a full micro-batch it takes up to "
                f"{ranks.memory_bytes / _GB:.1f} GB, and a GPU of {node.node_ip} has {node.gpu_bytes / _GB:.0f} GB. "
                "Lower learner.micro_batch_tokens or rollout.max_context_tokens, offload more (learner.offload), or "
                "set learner.gradient_checkpointing to true if it is not."
            )
    return ""


def describe_loading(topology: Topology) -> str:
    """Return the memory that rank 0 needs only while models load; "" where it is less than a GB."""
    ranks = topology.ranks
    if ranks.loading_bytes < _GB:
        return ""
    where = f"of {ranks.places[0].node_ip}" if ranks.places else "of its node"
    return (
        f"Rank 0 reads the whole model: {_size(ranks.loading_bytes)} in the memory {where} while the ranks load. The "
        "others receive their part from it."
    )


def describe_push(topology: Topology) -> str:
    """Return the memory that servers need only while a push loads; "" where it is less than a GB, or in turns."""
    servers = topology.servers
    if not servers.count or servers.push_bytes < _GB or (topology.shares_devices and topology.has_gpus):
        return ""
    where = "each GPU of a server" if servers.num_gpus else "a server"
    return (
        f"While a push loads, {where} takes {_size(servers.push_bytes)} more. vLLM leaves 8% of a GPU free by default: "
        "lower gpu_memory_utilization in rollout.engine_args if that is less."
    )


def describe_crowded(topology: Topology) -> str:
    """Return a warning about the first node without GPUs that has more ranks and servers than cores; "" without one."""
    if topology.has_gpus:
        return ""
    ranks, servers = topology.ranks.places, topology.servers.places
    for node in topology.nodes:
        num = ranks.count(node), servers.count(node)
        if node.num_cpus is not None and sum(num) > node.num_cpus:
            each = f"{count_of(num[0], topology.ranks.role)} and {count_of(num[1], topology.servers.role)}"
            return (
                f"Node {node.node_ip} has {count_of(node.num_cpus, 'CPU core')} for {each}: they slow each other down. "
                "Lower learner.num_ranks or rollout.num_servers."
            )
    return ""


def count_of(number: int, name: str) -> str:
    """Return a number with a noun: "1 node", "2 nodes"."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def _size(num_bytes: int) -> str:
    """Return bytes in GB, or in MB below one GB."""
    return f"{num_bytes / _GB:,.1f} GB" if num_bytes >= _GB else f"{num_bytes / 1e6:,.0f} MB"


def _role_row(processes: Processes, is_placed: bool) -> tuple[str, str, str, str, str]:
    gpus = f"{processes.num_gpus:g}{'' if is_placed or not processes.num_gpus else ' (0 without GPUs)'}"
    memory = f"{_size(processes.memory_bytes)} {processes.besides}"
    memory += f", {_size(processes.host_bytes)} of host memory" if processes.host_bytes else ""
    num_nodes = len({id(node) for node in processes.places})
    where = f"{processes.where} on {num_nodes} node{'s' * (num_nodes > 1)}" if num_nodes else _WHERE[processes.where]
    return processes.role, str(processes.count), gpus, memory, where


def _node_table(topology: Topology) -> Table:
    table = Table("node", "GPUs", "learner ranks", "rollout servers", "memory of each GPU")
    for row in node_rows(topology):
        table.add_row(*row)
    return table


def _totals(topology: Topology) -> str:
    taken = sum(_gpus_taken(topology, node) for node in topology.nodes)
    present = sum(node.num_gpus for node in topology.nodes)
    ranks, servers = topology.ranks, topology.servers
    in_all = ranks.memory_bytes * ranks.count + servers.memory_bytes * servers.count * max(1, int(servers.num_gpus))
    idle = f" {count_of(present - taken, 'GPU')} not used." if taken < present else ""
    return (
        f"In all: {taken} of {count_of(present, 'GPU')}, {count_of(len(topology.nodes), 'node')}; {_size(in_all)} in "
        f"{count_of(ranks.count, 'rank')} and {count_of(servers.count, 'server')}, without their KV caches.{idle}"
    )


def _turns(topology: Topology) -> str:
    """Return the memory on a shared device in each part of a step."""
    rank, server = topology.ranks, topology.servers
    if not rank.num_gpus:
        return "Ranks and servers take turns: servers sleep while ranks train. Without GPUs they free no memory."
    in_push = sum(each.state_bytes + each.push_bytes for each in (rank, server))
    return (
        f"Ranks and servers take turns on each GPU. Generating: a server, {server.memory_bytes / _GB:.1f} GB and its "
        f"KV cache; training: a rank, {rank.memory_bytes / _GB:.1f} GB; a push: both and its buckets, "
        f"without cache and activations, {in_push / _GB:.1f} GB. Between turns they are in the host's memory."
    )


def _gpus_taken(topology: Topology, node: Node) -> int:
    if topology.shares_devices and topology.has_gpus:
        return topology.ranks.places.count(node)
    of_ranks = topology.ranks.places.count(node) * int(topology.ranks.num_gpus)
    return of_ranks + gpus_of(topology.servers.places.count(node), topology.servers.num_gpus)


def _numbers(processes: Processes, node: Node) -> str:
    """Return the numbers of a role's processes on a node, as "0-7" or "2, 5"; "-" without any."""
    numbers = [number for number, place in enumerate(processes.places) if place == node]
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "-"


def _server_on_card(topology: Topology) -> str:
    """Return "server", or "each of 2 servers" where 2 share a GPU."""
    num_gpus = topology.servers.num_gpus
    sharing = servers_on_gpu(num_gpus) if 0.0 < num_gpus < 1.0 and not topology.shares_devices else 1
    return f"each of {sharing} servers" if sharing > 1 else "server"


def _on_card(topology: Topology, node: Node) -> str:
    """Return the used memory of a GPU and of the host: "rank 26.2 of 80 GB; host 706 of 2,000 GB".

    Empty without GPUs, and on a node without processes of the run.
    """
    if not node.num_gpus:
        return ""
    parts = [
        f"{name} {processes.memory_bytes / _GB:.1f}{' + KV cache' * (processes is topology.servers)}"
        for name, processes in (("rank", topology.ranks), (_server_on_card(topology), topology.servers))
        if node in processes.places
    ]
    of = f" of {node.gpu_bytes / _GB:.0f}" if node.gpu_bytes is not None else ""
    on_host = sum(part.places.count(node) * part.host_bytes for part in (topology.ranks, topology.servers))
    of_host = f" of {node.host_bytes / _GB:,.0f}" if node.host_bytes is not None else ""
    host = f"; host {on_host / _GB:,.0f}{of_host} GB" if on_host else ""
    return f"{(' or ' if topology.shares_devices else ', ').join(parts)}{of} GB{host}" if parts else ""
