"""The plan of a run's processes: what settings ask for, on what a cluster has. `--plan` prints it, launching obeys."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from learner.disk.model_folder import BYTES
from learner.objectives.needs import is_reference_the_base, needs_of, needs_reference
from learner.run.placement.assign import Room, Wanted, assign, assign_together, place
from learner.run.placement.node import Node
from learner.run.placement.refusals import (
    check_host_memory,
    check_memory,
    check_one_machine,
    check_room,
    check_second_copies,
    check_turns,
    check_whole_host,
    explain_no_room,
)
from learner.run.rank_memory import Sizes, rank_memory
from protocol.errors import SettingsError
from protocol.settings.roles.placement import RankPlacement, Strategy, can_take_turns, processes_per_node
from protocol.settings.settings import Settings

Backend = Literal["nccl", "gloo", "ipc"]
Where = Literal["here"] | Strategy  # "here" is the command's own node

_RANK = "learner rank"
_SERVER = "rollout server"
# Shares of one GPU that make Ray put a rank and a server on each, and never two of a kind: servers take theirs first.
_SERVERS_SHARE, _RANKS_SHARE = 0.6, 0.4


@dataclass(frozen=True)
class Processes:
    """Processes of one role."""

    role: str  # for people
    count: int  # of them; 0: the run needs none
    num_gpus: float  # of each; below 1: several share one
    where: Where  # as the settings ask
    memory_bytes: int  # of each on its device, as far as it is known beforehand
    besides: str  # what comes on top
    host_bytes: int = 0  # of each in the host's memory beside a GPU's
    copy_bytes: int = 0  # of those in the host's memory, what a push takes that comes beside the weights in use
    state_bytes: int = 0  # of memory_bytes, what is there all the time: less would not start
    resources: Mapping[str, float] = field(default_factory=dict)  # what each takes of its node's own names
    places: tuple[Node, ...] = ()  # of each its node, in order; empty where no cluster is known


@dataclass(frozen=True)
class Topology:
    """All processes of a run."""

    coordinator: Processes  # one, beside the command
    ranks: Processes  # learner.num_ranks of them
    servers: Processes  # rollout.num_servers of them; none where nothing is sampled
    backend: Backend  # how weights travel
    nodes: tuple[Node, ...] = ()  # of the cluster, the head first; empty where none is known
    shares_devices: bool = False  # True: each rank takes turns with the server of its number

    @property
    def has_gpus(self) -> bool:
        """True when learner ranks have a GPU each."""
        return self.ranks.num_gpus > 0


def plan_topology(settings: Settings, sizes: Sizes, nodes: Sequence[Node] | None) -> Topology:
    """Return which processes a run has, with which GPUs and where.

    sizes: of its models. nodes: of the cluster, running or described; None when none is known: then GPUs are planned
    unless weights travel by gloo.
    Raises: SettingsError when the cluster cannot hold them, or weights cannot travel as asked.
    """
    num_gpus = None if nodes is None else sum(node.num_gpus for node in nodes)
    is_shared = _shares_devices(settings, num_gpus)
    backend = choose_backend(
        settings.weights.backend, num_gpus, num_sharing=settings.learner.num_ranks if is_shared else 0
    )
    if settings.weights.second_copy:
        _check_second_copy(backend, is_shared=is_shared, is_sure=bool(num_gpus) or settings.weights.backend != "auto")
    has_gpus = backend == "nccl" or is_shared if num_gpus is None else num_gpus > 0
    ranks, servers = _ranks(settings, sizes, has_gpus), _servers(settings, sizes, has_gpus, backend, is_shared)
    if nodes is not None:
        ordered = tuple(sorted(nodes, key=lambda node: not node.is_head))
        ranks, servers = (_placed_together if is_shared else _placed)(ranks, servers, ordered, settings)
        if backend == "ipc":
            check_one_machine(ranks.places[0], servers.places)
    else:
        ordered = ()
    if is_shared:
        ranks, servers = _taking_turns(ranks, _RANKS_SHARE), _taking_turns(servers, _SERVERS_SHARE)
    window = Processes("coordinator", 1, 0, "here", _window_bytes(settings), "for the window")
    return Topology(window, ranks, servers, backend, ordered, is_shared)


def servers_beside(ranks: Processes, planned: Topology, settings: Settings) -> Processes:
    """Return the servers of a plan with places beside these ranks, which are at work and stay where they are.

    Raises: SettingsError when there is no room beside them.
    """
    at = Counter(node.node_id for node in ranks.places)
    if at == Counter(node.node_id for node in planned.ranks.places):
        return planned.servers
    room, placement = Room(planned.nodes), settings.placement
    wanted_ranks = _wanted("placement.ranks", ranks, placement.ranks, 1)
    for number, node in enumerate(room.nodes):
        room.take(wanted_ranks, number, at[node.node_id])
    servers = planned.servers
    wanted = _wanted("placement.servers", servers, placement.servers, settings.rollout.tensor_parallel_size)
    found = None if placement.is_colocated else place(wanted, room)
    if found is None:
        raise SettingsError(
            f"settings: {servers.count} rollout servers have no room beside the learner ranks where these are now. "
            "Have nodes join (deploy/start_cluster.sh --join); or stop the run and give its command again with so many."
        )
    return replace(servers, places=tuple(found))


def choose_backend(wanted: str, num_gpus: int | None, num_sharing: int = 0) -> Backend:
    """Return how weights travel; num_gpus: None while no cluster runs. num_sharing: ranks that take turns with servers.

    Raises: SettingsError when the cluster cannot do what was asked for.
    """
    if wanted == "ipc" and num_gpus and num_sharing != 1:
        how = f"{num_sharing} ranks share theirs" if num_sharing else "they have GPUs of their own"
        raise SettingsError(
            f"settings: weights.backend = ipc needs one rank and one server on one GPU, and {how}. Use auto, or set "
            "placement.devices to shared with learner.num_ranks and rollout.num_servers at 1."
        )
    if wanted == "auto" and num_sharing:
        return "ipc" if num_sharing == 1 else "gloo"
    if wanted == "nccl" and num_gpus == 0:
        raise SettingsError("settings: weights.backend = nccl needs GPUs, and this cluster has none. Use auto or gloo.")
    if wanted == "auto":
        return "gloo" if num_gpus == 0 else "nccl"
    return "nccl" if wanted == "nccl" else "ipc" if wanted == "ipc" else "gloo"


def _shares_devices(settings: Settings, num_gpus: int | None) -> bool:
    placement = settings.placement
    if not needs_of(settings).rollouts or placement.devices == "split":
        return False
    is_able = can_take_turns(placement, settings.learner, settings.rollout, settings.weights)
    return placement.devices == "shared" or (num_gpus == 1 and is_able)


def _check_second_copy(backend: Backend, *, is_shared: bool, is_sure: bool) -> None:
    """Raise SettingsError where no server has a second copy. is_sure: whether the backend will be this one."""
    if is_shared:
        raise SettingsError(
            "settings: weights.second_copy = true has servers generate while a push comes, and those that share their "
            "devices sleep then. Leave second_copy out, or set placement.devices to split."
        )
    if backend != "gloo" and is_sure:
        raise SettingsError(
            f"settings: weights.second_copy = true needs weights.backend = gloo: over {backend} a push is loaded as it "
            "comes. Leave second_copy out."
        )


def _taking_turns(processes: Processes, share: float) -> Processes:
    """Return these with a part of a GPU each, and with what they have on it kept by the host while it is not theirs."""
    if not processes.num_gpus:
        return processes
    away = processes.host_bytes + processes.state_bytes
    return replace(processes, num_gpus=share, where="packed", host_bytes=away)


def _ranks(settings: Settings, sizes: Sizes, has_gpus: bool) -> Processes:
    memory, placed = rank_memory(settings, sizes), settings.placement.ranks
    return Processes(
        role=_RANK,
        count=settings.learner.num_ranks,
        num_gpus=int(has_gpus),
        where=placed.strategy,
        memory_bytes=memory.device if has_gpus else memory.device + memory.host,
        besides="with activations" if sizes.policy.num_layers else "+ activations",
        host_bytes=memory.host if has_gpus else 0,
        state_bytes=memory.device - memory.passing + (0 if has_gpus else memory.host),
        resources=placed.resources,
    )


def _servers(settings: Settings, sizes: Sizes, has_gpus: bool, backend: Backend, is_shared: bool) -> Processes:
    size, placed = settings.rollout.tensor_parallel_size, settings.placement.servers
    whole = sizes.policy.parameters * BYTES[settings.policy.dtype]
    # Over gloo each worker keeps the whole push in the host's memory until it loads its part of it.
    has_copy = backend == "gloo" and settings.weights.second_copy is not False and not is_shared
    copy = whole * size if has_copy else 0
    weights = whole // size
    return Processes(
        role=_SERVER,
        count=settings.rollout.num_servers if needs_of(settings).rollouts else 0,
        num_gpus=(size if placed.gpus == 1.0 else placed.gpus) if has_gpus else 0,
        where=placed.strategy,
        memory_bytes=weights if has_gpus else whole + copy,
        besides="+ KV cache" if has_gpus or not copy else "with a push's second copy + KV cache",
        host_bytes=copy if has_gpus else 0,
        copy_bytes=copy,
        state_bytes=weights,
        resources=placed.resources,
    )


def _placed(
    ranks: Processes, servers: Processes, nodes: tuple[Node, ...], settings: Settings
) -> tuple[Processes, Processes]:
    """Return both with the node of each process. Raises: SettingsError when the nodes cannot hold them."""
    placement, size = settings.placement, settings.rollout.tensor_parallel_size
    wanted_ranks = _wanted("placement.ranks", ranks, placement.ranks, 1)
    wanted_servers = _wanted("placement.servers", servers, placement.servers, size)
    check_room(wanted_ranks, wanted_servers, nodes, settings)
    together = placement.is_colocated and servers.count > 0
    found = (assign_together if together else assign)(wanted_ranks, wanted_servers, nodes)
    if found is None:
        raise SettingsError(f"settings: {explain_no_room(wanted_ranks, wanted_servers, nodes, together)}")
    placed = replace(ranks, places=tuple(found[0])), replace(servers, places=tuple(found[1]))
    check_host_memory(ranks.host_bytes, placed[0].places)
    check_second_copies(servers.copy_bytes, servers.host_bytes or servers.memory_bytes, placed[1].places)
    of_server = servers.host_bytes if servers.num_gpus else servers.memory_bytes
    of_rank = ranks.host_bytes if ranks.num_gpus else ranks.state_bytes
    check_whole_host(of_rank, placed[0].places, of_server, placed[1].places)
    has_reference = needs_reference(settings) and not is_reference_the_base(settings)
    whole = "reference" if has_reference and not settings.reference.offload else ""
    for processes, whole_on_each in zip(placed, (whole, ""), strict=True):
        check_memory(processes.role, processes.state_bytes, processes.num_gpus, processes.places, whole_on_each)
    return placed


def _placed_together(
    ranks: Processes, servers: Processes, nodes: tuple[Node, ...], settings: Settings
) -> tuple[Processes, Processes]:
    """Return both, each server on the node of the rank that it takes turns with. Raises: as `_placed`."""
    wanted = _wanted("placement.ranks", ranks, settings.placement.ranks, 1)
    nobody = replace(wanted, setting="placement.servers", count=0)
    check_room(wanted, nobody, nodes, settings)
    found = place(wanted, Room(nodes))
    if found is None:
        raise SettingsError(f"settings: {explain_no_room(wanted, nobody, nodes, together=False)}")
    check_turns(ranks.state_bytes, servers.state_bytes, ranks.host_bytes, found, has_gpus=ranks.num_gpus > 0)
    return replace(ranks, places=tuple(found)), replace(servers, places=tuple(found))


def _wanted(setting: str, processes: Processes, placed: RankPlacement, gpus_each: int) -> Wanted:
    per_node = processes_per_node(placed, processes.count, gpus_each) if processes.count else None
    return Wanted(
        setting=setting,
        count=processes.count,
        gpus=processes.num_gpus,
        strategy=placed.strategy,
        num_nodes=placed.nodes,
        gpus_per_node=placed.gpus_per_node,
        per_node=per_node,
        resources=processes.resources,
    )


def _window_bytes(settings: Settings) -> int:
    """9 bytes a token: id, logprob and mask; at most the whole context for every sample in the window."""
    groups = (settings.learner.max_staleness + 1) * settings.learner.groups_per_step
    return groups * settings.rollout.group_size * settings.rollout.max_context_tokens * 9
