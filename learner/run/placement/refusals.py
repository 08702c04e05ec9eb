"""Why the nodes of a cluster cannot hold a run, in one sentence: the value, what was expected, what to change."""

from collections import Counter
from collections.abc import Sequence

from learner.run.placement.assign import Room, Wanted, gpus_of, place
from learner.run.placement.node import Node
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

# Role -> what it always has in memory, and what makes that less.
_STATES = {
    "learner rank": (
        "weights and optimizer",
        "Raise learner.num_ranks or learner.zero_stage, or set learner.offload",
    ),
    "rollout server": ("weights", "Raise rollout.tensor_parallel_size, or set placement.servers.gpus to 1"),
}


def check_room(ranks: Wanted, servers: Wanted, nodes: Sequence[Node], settings: Settings) -> None:
    """Raise SettingsError for what one can tell without placing: Ray would wait for it until a deadline."""
    if not nodes:
        raise SettingsError(
            "settings: the cluster has no node that takes processes at the moment: one that was started anew is known "
            "as two for half a minute. Give the command again, or have nodes join (deploy/start_cluster.sh --join)."
        )
    for wanted in (ranks, servers):
        if wanted.count:
            _check_nodes(wanted, nodes)
            _check_names(wanted, nodes)
    _check_gpus(ranks, servers, nodes, settings)


def check_memory(role: str, state_bytes: int, num_gpus: float, places: Sequence[Node], whole_on_each: str = "") -> None:
    """Raise SettingsError where what a process always has in memory is more than its GPU's.

    whole_on_each: model of the ranks that none of the usual cures makes smaller on a rank: "reference"; "": none is.
    """
    for node in places:
        if num_gpus and node.gpu_bytes is not None and state_bytes > node.gpu_bytes * min(num_gpus, 1.0):
            part = "" if num_gpus >= 1.0 else f"{num_gpus:g} of "
            what, cure = _STATES[role]
            cure += f". The {whole_on_each} is whole on each: set {whole_on_each}.offload" if whole_on_each else ""
            raise SettingsError(
                f"settings: each {role} has {state_bytes / 1e9:.1f} GB of {what} on each GPU, and "
                f"{part}a GPU of {node.node_ip} has {node.gpu_bytes / 1e9:.0f} GB. {cure}."
            )


def check_one_machine(first_rank: Node, servers: Sequence[Node]) -> None:
    """Raise SettingsError where a server is on another machine than the first rank, which shares memory with it."""
    elsewhere = sorted({node.node_ip for node in servers if node != first_rank})
    if elsewhere:
        raise SettingsError(
            f"settings: weights.backend = ipc shares memory of one machine, and the first rank is on "
            f"{first_rank.node_ip}, servers on {', '.join(elsewhere)}. Set weights.backend to auto, or "
            "placement.colocate to [[ranks, servers]]."
        )


def check_turns(
    rank_bytes: int, server_bytes: int, offloaded_bytes: int, places: Sequence[Node], *, has_gpus: bool
) -> None:
    """Raise SettingsError where a rank's state beside a server's weights, as in a push, is more than a GPU's memory, or
    more than the host's, where both are while it is not their turn. offloaded_bytes: of a rank, always there.
    """
    for node in places if has_gpus else ():
        on_card, on_host = rank_bytes + server_bytes, (rank_bytes + server_bytes + offloaded_bytes) * places.count(node)
        if node.gpu_bytes is not None and on_card > node.gpu_bytes:
            raise SettingsError(
                f"settings: with placement.devices = shared a push has {on_card / 1e9:.1f} GB of weights and optimizer "
                f"on a GPU, and a GPU of {node.node_ip} has {node.gpu_bytes / 1e9:.0f} GB. Set learner.offload to "
                "optimizer, or placement.devices to split."
            )
        if node.host_bytes is not None and on_host > node.host_bytes:
            raise SettingsError(
                f"settings: placement.devices = shared keeps {on_host / 1e9:.0f} GB in the memory of {node.node_ip} "
                f"while others use its GPUs, and it has {node.host_bytes / 1e9:.0f} GB. Set placement.devices to split."
            )


def check_host_memory(host_bytes: int, places: Sequence[Node]) -> None:
    """Raise SettingsError where what ranks keep off their GPUs is more than their node's own memory."""
    for node in places:
        count = places.count(node)
        if node.host_bytes is not None and host_bytes * count > node.host_bytes:
            raise SettingsError(
                f"settings: learner.offload keeps {host_bytes * count / 1e9:.0f} GB of {count} ranks in the memory of "
                f"{node.node_ip}, which has {node.host_bytes / 1e9:.0f} GB. Set placement.ranks.nodes to more nodes, "
                "or offload less."
            )


def check_second_copies(copy_bytes: int, host_bytes: int, places: Sequence[Node]) -> None:
    """Raise SettingsError where pushes that come beside the weights in use are more than a node has room for.

    copy_bytes: what that takes of a server. host_bytes: what the server has in the host's memory in all.
    """
    for node in places:
        count = places.count(node)
        if copy_bytes and node.host_bytes is not None and host_bytes * count > node.host_bytes:
            less = "weights.second_copy to false"
            if (host_bytes - copy_bytes) * count > node.host_bytes:
                less += ", and rollout.num_servers lower or placement.servers.nodes to more nodes"
            raise SettingsError(
                f"settings: beside the weights in use a push takes {copy_bytes / 1e9:.0f} GB of host memory in each "
                f"rollout server. The {count} on {node.node_ip} need {host_bytes * count / 1e9:.0f} GB in all, and it "
                f"has {node.host_bytes / 1e9:.0f} GB. Set {less}."
            )


def check_whole_host(rank_bytes: int, ranks: Sequence[Node], server_bytes: int, servers: Sequence[Node]) -> None:
    """Raise SettingsError where ranks and servers of one node have more in its own memory than it has.

    rank_bytes, server_bytes: what each always has there.
    """
    num_ranks, num_servers = (Counter(map(id, places)) for places in (ranks, servers))
    for node in (*ranks, *servers):
        of_ranks, of_servers = rank_bytes * num_ranks[id(node)], server_bytes * num_servers[id(node)]
        if node.host_bytes is not None and of_ranks + of_servers > node.host_bytes:
            raise SettingsError(
                f"settings: {num_ranks[id(node)]} ranks and {num_servers[id(node)]} servers on {node.node_ip} have "
                f"{of_ranks / 1e9:.0f} and {of_servers / 1e9:.0f} GB in its memory, and it has "
                f"{node.host_bytes / 1e9:.0f} GB. Set placement.ranks.nodes or placement.servers.nodes to more nodes, "
                "or have fewer of them."
            )


def explain_no_room(ranks: Wanted, servers: Wanted, nodes: Sequence[Node], together: bool) -> str:
    """Return why ranks and servers have no places on these nodes, although each of the simple checks passed."""
    for wanted in (ranks, servers):
        if place(wanted, Room(nodes)) is None:
            # A run that is given again while one of its nodes is away is refused by this too.
            cure = f"{_cure(wanted)}, or have more nodes join (deploy/start_cluster.sh --join)"
            return f"{_described(wanted)} do not fit on nodes with {_told(wanted, nodes)}. {cure}."
    where = "on the same nodes" if together else "beside each other"
    cure = "Change one of them, or remove placement.colocate" if together else "Change one of them"
    gpus = ", ".join(str(node.num_gpus) for node in nodes)
    return f"{_described(ranks)} and {_described(servers)} do not fit {where} on nodes with {gpus} GPUs. {cure}."


def _check_nodes(wanted: Wanted, nodes: Sequence[Node]) -> None:
    """Raise SettingsError for more nodes than there are, or more GPUs than a node has."""
    if wanted.num_nodes is not None and wanted.num_nodes > len(nodes):
        raise SettingsError(
            f"settings: {wanted.setting}.nodes = {wanted.num_nodes}, and the cluster has {len(nodes)}. Lower it, or "
            "have more nodes join (deploy/start_cluster.sh --join)."
        )
    has_gpus = any(node.num_gpus for node in nodes)
    if not has_gpus and wanted.gpus_per_node is not None:
        raise SettingsError(
            f"settings: {wanted.setting}.gpus_per_node = {wanted.gpus_per_node}, and this cluster has no GPUs. Remove "
            "it, or use a cluster that has some."
        )
    most = max(node.num_gpus for node in nodes)
    if has_gpus and wanted.gpus_per_node is not None and wanted.gpus_per_node > most:
        raise SettingsError(
            f"settings: {wanted.setting}.gpus_per_node = {wanted.gpus_per_node}, and no node has more than {most} "
            "GPUs. Lower it."
        )


def _check_names(wanted: Wanted, nodes: Sequence[Node]) -> None:
    """Raise SettingsError for a name that no node has, or of which none has enough."""
    for name, each in wanted.resources.items():
        most = max(node.resources.get(name, 0.0) for node in nodes)
        if not most:
            there = sorted({other for node in nodes for other in node.resources})
            raise SettingsError(
                f"settings: {wanted.setting}.resources names {name}, and no node has it "
                f"({', '.join(there) or 'none has a name of its own'}). Start the nodes that are meant with "
                f"""start_cluster.sh --resources '{{"{name}": 1}}', or remove it."""
            )
        if each > most:
            raise SettingsError(
                f"settings: {wanted.setting}.resources.{name} = {each:g} of each process, and no node has more than "
                f"{most:g}. Lower it."
            )


def _check_gpus(ranks: Wanted, servers: Wanted, nodes: Sequence[Node], settings: Settings) -> None:
    """Raise SettingsError for more GPUs than there are. A server's are of one node; ranks take what servers leave."""
    rollout, share = settings.rollout, settings.placement.servers.gpus
    present = sum(node.num_gpus for node in nodes)
    if share < 1.0 and not present:
        raise SettingsError(
            f"settings: placement.servers.gpus = {share:g}, and this cluster has no GPUs. Remove it, or use a cluster "
            "that has some."
        )
    needed = gpus_of(ranks.count, ranks.gpus) + gpus_of(servers.count, servers.gpus)
    asked = (
        f"learner.num_ranks = {ranks.count} and rollout.num_servers = {servers.count} with "
        f"rollout.tensor_parallel_size = {rollout.tensor_parallel_size}"
    )
    if needed > present and ranks.gpus and not servers.count:
        raise SettingsError(
            f"settings: learner.num_ranks = {ranks.count} needs {needed} GPUs; the cluster has {present}. Lower it."
        )
    if needed > present and ranks.gpus:
        raise SettingsError(f"settings: {asked} need {needed} GPUs; the cluster has {present}. Lower one of them.")
    if servers.gpus < 1.0:
        return
    places = sum(node.num_gpus // int(servers.gpus) for node in nodes)
    if servers.count > places:
        each = ", ".join(str(node.num_gpus) for node in nodes)
        raise SettingsError(
            f"settings: rollout.num_servers = {servers.count} with rollout.tensor_parallel_size = "
            f"{int(servers.gpus)} fit {places} times on nodes with {each} GPUs: a server's GPUs are of one node. "
            "Lower one of them."
        )


def _described(wanted: Wanted) -> str:
    """Return a role as the settings describe it: "placement.ranks (8 processes, nodes = 2)"."""
    said = [f"{wanted.count} processes"]
    said += [f"nodes = {wanted.num_nodes}"] if wanted.num_nodes is not None else []
    said += [f"gpus_per_node = {wanted.gpus_per_node}"] if wanted.gpus_per_node is not None else []
    said += [f"{name} = {each:g} each" for name, each in wanted.resources.items()]
    return f"{wanted.setting} ({', '.join(said)})"


def _told(wanted: Wanted, nodes: Sequence[Node]) -> str:
    """Return what the nodes have of what these processes take."""
    told = [f"{', '.join(str(node.num_gpus) for node in nodes)} GPUs"] if wanted.gpus else []
    for name in wanted.resources:
        told.append(f"{', '.join(f'{node.resources.get(name, 0.0):g}' for node in nodes)} {name}")
    return " and ".join(told)


def _cure(wanted: Wanted) -> str:
    names = ["nodes"] if wanted.num_nodes is not None else []
    names += ["gpus_per_node"] if wanted.gpus_per_node is not None else []
    names += ["resources"] if wanted.resources else []
    return f"Lower {' or '.join(f'{wanted.setting}.{name}' for name in names) or 'their number'}"
