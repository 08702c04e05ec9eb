"""Why nodes cannot hold a run: a table of role, need, node, and cure. Every shortage is shown at once."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from learner.plan.assign import FreeCapacity, RoleRequest, gpus_of, place
from learner.plan.processes import Node, Processes
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

_CLUSTER = "the cluster"
_JOIN = "have more nodes join (sluice start --join)"
_STATE = "weights and optimizer"  # permanent GPU memory of a learner rank
_GB = 1e9


@dataclass(frozen=True)
class Shortage:
    """One row of the table."""

    role: str  # processes, in the plural
    needs: str  # amount, with the setting that asks for it
    node: str  # address of a node, or a group of nodes
    has: str  # amount on that node
    cure: str  # advice

    def __str__(self) -> str:
        return f"{self.role} need {self.needs}; {self.node} has {self.has}. {self.cure}."


def refuse(shortages: Sequence[Shortage]) -> None:
    """Raise SettingsError with one line for each shortage; return when there is none."""
    if len(shortages) == 1:
        raise SettingsError(f"settings: {shortages[0]}")
    if shortages:
        rows = "".join(f"\n- {shortage}" for shortage in shortages)
        raise SettingsError(f"settings: the cluster cannot hold this run, for {len(shortages)} reasons:{rows}")


def count_shortages(
    ranks: RoleRequest, servers: RoleRequest, nodes: Sequence[Node], settings: Settings
) -> list[Shortage]:
    """Return the shortages that need no placing: of nodes, GPUs and custom resources."""
    found: list[Shortage] = []
    for request in (ranks, servers):
        if request.count:
            found += [*_too_few_nodes(request, nodes), *_too_few_resources(request, nodes)]
    return [*found, *_too_few_gpus(ranks, servers, nodes, settings)]


def placing_shortages(
    ranks: RoleRequest, servers: RoleRequest, nodes: Sequence[Node], *, together: bool
) -> list[Shortage]:
    """Return why ranks and servers find no places although `count_shortages` found nothing."""
    # A run that is resumed while one of its nodes is away is refused here too.
    rows = [
        Shortage(
            request.role,
            f"{request.count} places ({_request_text(request)})",
            f"the cluster, {_of_nodes(request, nodes)},",
            "too few that fit",
            f"Lower {_names(request)}, or {_JOIN}",
        )
        for request in (ranks, servers)
        if place(request, FreeCapacity(nodes)) is None
    ]
    where, or_split = ("on the same nodes", ", or remove placement.colocate") if together else ("together", "")
    asked = f"{ranks.count} and {servers.count} places {where} ({_request_text(ranks)}; {_request_text(servers)})"
    has = f"{', '.join(str(node.num_gpus) for node in nodes)} GPUs"
    return rows or [
        Shortage(f"{ranks.role} and {servers.role}", asked, _CLUSTER, has, f"Change one of the two{or_split}")
    ]


def gpu_memory_shortages(processes: Processes, nodes: Sequence[Node], whole_on_each: str = "") -> list[Shortage]:
    """Return a shortage for the first node whose GPU is smaller than the permanent memory of a process, or none.

    nodes: the whole cluster; its largest GPU counts while the processes have no places.
    whole_on_each: model of the ranks that sharding does not make smaller: "reference"; "": there is none.
    """
    if processes.role == "learner rank":
        state, cure = _STATE, "Raise learner.num_ranks or learner.zero_stage, or set learner.offload"
    else:
        state, cure = "weights", "Raise rollout.tensor_parallel_size, or set placement.servers.gpus to 1"
    if whole_on_each:
        cure += f". The {whole_on_each} is whole on each rank: learner.zero_stage = 3 shards it"
    share = min(processes.num_gpus, 1.0)
    largest = sorted(nodes, key=lambda node: node.gpu_bytes or 0)[-1:]
    for node in (processes.places or largest) if processes.num_gpus and processes.count else ():
        if node.gpu_bytes is not None and processes.state_bytes > node.gpu_bytes * share:
            needs = f"{processes.state_bytes / _GB:.1f} GB of {state} on each GPU"
            has = f"{node.gpu_bytes / _GB:.0f} GB a GPU" + (f", of which each gets {share:g}" if share < 1.0 else "")
            return [Shortage(f"{processes.role}s", needs, node.node_ip, has, cure)]
    return []


def host_memory_shortages(ranks: Processes, servers: Processes) -> list[Shortage]:
    """Return a shortage for the first node whose own memory is smaller than its ranks and servers need, or none."""
    of_rank = ranks.host_bytes if ranks.num_gpus else ranks.state_bytes
    of_server = servers.host_bytes if servers.num_gpus else servers.memory_bytes
    num_ranks, num_servers = (Counter(map(id, roles.places)) for roles in (ranks, servers))
    for node in {id(at): at for at in (*ranks.places, *servers.places)}.values():
        for_ranks, for_servers = of_rank * num_ranks[id(node)], of_server * num_servers[id(node)]
        if node.host_bytes is None or for_ranks + for_servers <= node.host_bytes:
            continue
        cures = ["Set placement.ranks.nodes or placement.servers.nodes to more nodes"]
        cures += ["offload less (learner.offload)"] if ranks.host_bytes and for_ranks else []
        cures += ["set weights.second_copy to false"] if servers.copy_bytes and for_servers else []
        needs = (
            f"{(for_ranks + for_servers) / _GB:.0f} GB of host memory: {num_ranks[id(node)]} ranks with "
            f"{for_ranks / _GB:.0f} GB and {num_servers[id(node)]} servers with {for_servers / _GB:.0f} GB"
        )
        has, cure = f"{node.host_bytes / _GB:.0f} GB", ", or ".join(cures)
        return [Shortage("learner ranks and rollout servers", needs, node.node_ip, has, cure)]
    return []


def loading_shortages(ranks: Processes) -> list[Shortage]:
    """Return a shortage when the node of rank 0 has less memory than the whole model, which rank 0 reads there."""
    first = ranks.places[0]
    if first.host_bytes is None or ranks.loading_bytes <= first.host_bytes:
        return []
    needs = f"{ranks.loading_bytes / _GB:.0f} GB of host memory on the node of rank 0, which reads the whole model"
    cure = "Place the ranks on nodes with more memory (placement.ranks.resources)"
    return [Shortage("learner ranks", needs, first.node_ip, f"{first.host_bytes / _GB:.0f} GB", cure)]


def shared_device_shortages(ranks: Processes, servers: Processes) -> list[Shortage]:
    """Return shortages for the first node whose GPU, and the first whose memory, cannot hold both ranks and servers.

    A push has both and its buckets on the GPU; between turns one of them is in the host's memory. ranks.host_bytes: the
    offloaded part, always in the host's memory.
    """
    role, split = f"{ranks.role}s and {servers.role}s that share devices", "placement.devices to split"
    on_card = ranks.state_bytes + servers.state_bytes
    in_push = on_card + ranks.push_bytes + servers.push_bytes
    found: dict[str, Shortage] = {}
    for node in ranks.places if ranks.num_gpus else ():
        on_host = (on_card + ranks.host_bytes) * ranks.places.count(node)
        if node.gpu_bytes is not None and in_push > node.gpu_bytes:
            needs, has = f"{in_push / _GB:.1f} GB on each GPU in a push", f"{node.gpu_bytes / _GB:.0f} GB a GPU"
            cure = f"Offload more of the learner (learner.offload), or set {split}"
            found.setdefault("card", Shortage(role, needs, node.node_ip, has, cure))
        if node.host_bytes is not None and on_host > node.host_bytes:
            needs, has = f"{on_host / _GB:.0f} GB of host memory between turns", f"{node.host_bytes / _GB:.0f} GB"
            found.setdefault("host", Shortage(role, needs, node.node_ip, has, f"Set {split}"))
    return list(found.values())


def _too_few_nodes(request: RoleRequest, nodes: Sequence[Node]) -> Iterator[Shortage]:
    if request.num_nodes is not None and request.num_nodes > len(nodes):
        needs = f"{request.num_nodes} nodes ({request.setting}.nodes)"
        yield Shortage(request.role, needs, _CLUSTER, str(len(nodes)), f"Lower it, or {_JOIN}")
    most = max(node.num_gpus for node in nodes)
    if request.gpus_per_node is not None and request.gpus_per_node > most:
        needs = f"{request.gpus_per_node} GPUs on a node ({request.setting}.gpus_per_node)"
        cure = "Lower it" if most else "Remove it, or use a cluster with GPUs"
        yield Shortage(request.role, needs, "the largest node" if most else _CLUSTER, _gpus(most), cure)


def _too_few_resources(request: RoleRequest, nodes: Sequence[Node]) -> Iterator[Shortage]:
    for name, each in request.resources.items():
        most = max(node.resources.get(name, 0.0) for node in nodes)
        needs = f"{each:g} {name} each ({request.setting}.resources)"
        if not most:
            names = sorted({other for node in nodes for other in node.resources})
            start = f"""sluice start --resources '{{"{name}": 1}}'"""
            has = f"no {name}, only {', '.join(names)}" if names else f"no {name}"
            yield Shortage(request.role, needs, _CLUSTER, has, f"Start its nodes with {start}, or remove it")
        elif each > most:
            yield Shortage(request.role, needs, "the largest node", f"{most:g}", "Lower it")


def _too_few_gpus(
    ranks: RoleRequest, servers: RoleRequest, nodes: Sequence[Node], settings: Settings
) -> Iterator[Shortage]:
    """Yield shortages of GPUs. A server's GPUs are on one node; ranks take the GPUs that servers leave."""
    present = sum(node.num_gpus for node in nodes)
    share = settings.placement.servers.gpus
    if share < 1.0 and not present:
        needs = f"{share:g} of a GPU each (placement.servers.gpus)"
        yield Shortage(servers.role, needs, _CLUSTER, "no GPUs", "Remove it, or use a cluster with GPUs")
        return
    of_ranks, of_servers = gpus_of(ranks.count, ranks.gpus), gpus_of(servers.count, servers.gpus)
    if ranks.gpus and of_ranks + of_servers > present:
        roles, needs = ranks.role, f"{of_ranks} GPUs (learner.num_ranks = {ranks.count})"
        if servers.count:
            roles = f"{ranks.role} and {servers.role}"
            needs = (
                f"{of_ranks + of_servers} GPUs (learner.num_ranks = {ranks.count}, rollout.num_servers = "
                f"{servers.count}, rollout.tensor_parallel_size = {settings.rollout.tensor_parallel_size})"
            )
        yield Shortage(roles, needs, _CLUSTER, _gpus(present), "Lower one of these" if servers.count else "Lower it")
    elif servers.gpus >= 1.0 and servers.count > (places := sum(node.num_gpus // int(servers.gpus) for node in nodes)):
        needs = (
            f"{servers.count} times {int(servers.gpus)} GPUs of one node (rollout.num_servers, "
            "rollout.tensor_parallel_size)"
        )
        nodes_with = f"the cluster, {_of_nodes(servers, nodes)},"
        yield Shortage(servers.role, needs, nodes_with, f"room for {places}", "Lower one of these")


def _gpus(number: int) -> str:
    return f"{number} GPUs" if number else "no GPUs"


def _request_text(request: RoleRequest) -> str:
    """Return the settings of a role's places: "placement.ranks: nodes = 2, h100 = 1 each"."""
    parts = [f"nodes = {request.num_nodes}"] if request.num_nodes is not None else []
    parts += [f"gpus_per_node = {request.gpus_per_node}"] if request.gpus_per_node is not None else []
    parts += [f"{name} = {each:g} each" for name, each in request.resources.items()]
    return f"{request.setting}: {', '.join(parts)}" if parts else request.setting


def _of_nodes(request: RoleRequest, nodes: Sequence[Node]) -> str:
    """Return the nodes' amounts of everything that these processes take: "with 8, 4 GPUs and 1, 0 h100"."""
    amounts = [f"{', '.join(str(node.num_gpus) for node in nodes)} GPUs"] if request.gpus else []
    for name in request.resources:
        amounts.append(f"{', '.join(f'{node.resources.get(name, 0.0):g}' for node in nodes)} {name}")
    return f"with {' and '.join(amounts)}" if amounts else f"of {len(nodes)} nodes"


def _names(request: RoleRequest) -> str:
    names = ["nodes"] if request.num_nodes is not None else []
    names += ["gpus_per_node"] if request.gpus_per_node is not None else []
    names += ["resources"] if request.resources else []
    return " or ".join(f"{request.setting}.{name}" for name in names) or "their number"
