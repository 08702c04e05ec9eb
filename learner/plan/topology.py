"""The plan of a run's processes from settings, model sizes and nodes. `--plan` prints it; a start follows it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from learner.disk.model_folder import BYTES
from learner.plan.assign import FreeCapacity, RoleRequest, assign, assign_together, place
from learner.plan.memory import Sizes, loading_bytes, push_bytes, rank_memory, sending_bytes
from learner.plan.needs import is_reference_the_base, needs_reference, needs_rollouts
from learner.plan.processes import Backend, Node, Processes, Topology
from learner.plan.shortages import (
    Shortage,
    count_shortages,
    gpu_memory_shortages,
    host_memory_shortages,
    loading_shortages,
    placing_shortages,
    refuse,
    shared_device_shortages,
)
from protocol.errors import SettingsError
from protocol.settings.placement import RankPlacement, can_take_turns, processes_per_node
from protocol.settings.settings import Settings
from protocol.settings.zero_stage import zero_stage_of
from protocol.weights.wire import BUCKET_BYTES

_RANK = "learner rank"
_SERVER = "rollout server"


def plan_topology(settings: Settings, sizes: Sizes, nodes: Sequence[Node] | None) -> Topology:
    """Return the processes of a run, their GPUs and their nodes.

    sizes: of the run's models. nodes: of a running or described cluster; None: no cluster is known, and GPUs are
    planned unless weights travel by gloo.
    Raises: SettingsError when the cluster cannot hold them, or weights cannot travel as asked.
    """
    num_gpus = None if nodes is None else sum(node.num_gpus for node in nodes)
    is_shared = _shares_devices(settings, num_gpus)
    backend = choose_backend(settings.weights.backend, num_gpus, is_shared=is_shared)
    if settings.weights.second_copy:
        _check_second_copy(backend, is_shared=is_shared, is_sure=bool(num_gpus) or settings.weights.backend != "auto")
    has_gpus = backend == "nccl" or is_shared if num_gpus is None else num_gpus > 0
    ranks, servers = _ranks(settings, sizes, has_gpus, backend), _servers(settings, sizes, has_gpus, backend, is_shared)
    ordered = tuple(sorted(nodes or (), key=lambda node: not node.is_head))
    if nodes is not None:
        _check_nodes(nodes)
        ranks, servers = (_place_pairs if is_shared else _place_roles)(ranks, servers, ordered, settings)
        if backend == "ipc" and not is_shared:
            _check_one_machine(ranks.places[0], servers.places)
    if is_shared:
        ranks, servers = _with_turns(ranks), _with_turns(servers)
    window = Processes("coordinator", 1, 0, "here", _window_bytes(settings), "for the window")
    return Topology(window, ranks, servers, backend, ordered, is_shared)


def choose_backend(wanted: Literal["auto"] | Backend, num_gpus: int | None, *, is_shared: bool = False) -> Backend:
    """Return how weights travel; num_gpus: None while no cluster runs. is_shared: ranks and servers take turns.

    Raises: SettingsError when the cluster cannot use the wanted one.
    """
    if wanted == "ipc" and num_gpus and not is_shared:
        raise SettingsError(
            "settings: weights.backend = ipc needs ranks and servers on the same GPUs, and they have GPUs of their "
            "own. Use auto, or set placement.devices to shared."
        )
    if wanted == "nccl" and num_gpus == 0:
        raise SettingsError("settings: weights.backend = nccl needs GPUs, and this cluster has none. Use auto or gloo.")
    if wanted != "auto":
        return wanted
    return "ipc" if is_shared else "gloo" if num_gpus == 0 else "nccl"


def _shares_devices(settings: Settings, num_gpus: int | None) -> bool:
    placement = settings.placement
    if not needs_rollouts(settings) or placement.devices == "split":
        return False
    is_able = can_take_turns(placement, settings.learner, settings.rollout, settings.weights)
    return placement.devices == "shared" or (num_gpus == 1 and is_able)


def _check_nodes(nodes: Sequence[Node]) -> None:
    if not nodes:
        raise SettingsError(
            "settings: the cluster has no node that takes processes at the moment: Ray lists a restarted node twice "
            "for half a minute. Give the command again, or have nodes join (sluice start --join)."
        )


def _check_one_machine(first_rank: Node, servers: Sequence[Node]) -> None:
    """Raise SettingsError where a server is not on the machine of the first rank, which shares memory with it."""
    elsewhere = sorted({node.node_ip for node in servers if node != first_rank})
    if elsewhere:
        raise SettingsError(
            f"settings: weights.backend = ipc shares memory of one machine, and the first rank is on "
            f"{first_rank.node_ip}, servers on {', '.join(elsewhere)}. Set weights.backend to auto, or "
            "placement.colocate to [[ranks, servers]]."
        )


def _check_second_copy(backend: Backend, *, is_shared: bool, is_sure: bool) -> None:
    """Raise SettingsError where no server has a second copy. is_sure: whether the backend will be this one."""
    if is_shared:
        raise SettingsError(
            "settings: weights.second_copy = true has servers generate during a push, and servers that share "
            "devices sleep then. Leave second_copy out, or set placement.devices to split."
        )
    if backend != "gloo" and is_sure:
        raise SettingsError(
            f"settings: weights.second_copy = true needs weights.backend = gloo: over {backend} a push is loaded as it "
            "arrives. Leave second_copy out."
        )


def _with_turns(processes: Processes) -> Processes:
    """Return these with the host's memory that holds their state between turns."""
    if not processes.num_gpus:
        return processes
    away = processes.host_bytes + processes.state_bytes * max(1, int(processes.num_gpus))
    return replace(processes, where="packed", host_bytes=away)


def _ranks(settings: Settings, sizes: Sizes, has_gpus: bool, backend: Backend) -> Processes:
    is_sent = needs_rollouts(settings) and not (has_gpus and backend == "gloo")  # gloo's buckets are on the host
    bucket = _bucket_bytes(settings, has_gpus) if is_sent else 0
    memory, placed = rank_memory(settings, sizes, bucket, on_gpus=has_gpus), settings.placement.ranks
    stage = zero_stage_of(settings.learner.zero_stage, settings.policy.dtype)
    return Processes(
        role=_RANK,
        count=settings.learner.num_ranks,
        num_gpus=int(has_gpus),
        where=placed.strategy,
        memory_bytes=memory.device if has_gpus else memory.device + memory.host,
        besides="with activations" if sizes.policy.num_layers else "+ activations",
        host_bytes=memory.host if has_gpus else 0,
        push_bytes=sending_bytes(sizes.policy, settings.policy.dtype, stage, bucket),
        loading_bytes=loading_bytes(settings, sizes),
        state_bytes=memory.state + (0 if has_gpus else memory.host),
        resources=placed.resources,
    )


def _servers(settings: Settings, sizes: Sizes, has_gpus: bool, backend: Backend, is_shared: bool) -> Processes:
    size, placed = settings.rollout.tensor_parallel_size, settings.placement.servers
    whole = sizes.policy.parameters * BYTES[settings.policy.dtype]
    # Over gloo each worker keeps the whole push in the host's memory until it loads its part of it.
    has_copy = backend == "gloo" and settings.weights.second_copy is not False and not is_shared
    copy = whole * size if has_copy else 0
    weights = whole // size
    bucket = _bucket_bytes(settings, has_gpus)
    return Processes(
        role=_SERVER,
        count=settings.rollout.num_servers if needs_rollouts(settings) else 0,
        num_gpus=(size if placed.gpus == 1.0 else placed.gpus) if has_gpus else 0,
        where=placed.strategy,
        memory_bytes=weights if has_gpus else whole + copy,
        besides="+ KV cache" if has_gpus or not copy else "with a push's second copy + KV cache",
        host_bytes=copy if has_gpus else 0,
        push_bytes=push_bytes(settings, sizes.policy, 0 if has_copy else bucket, on_gpus=has_gpus),
        copy_bytes=copy,
        state_bytes=weights,
        resources=placed.resources,
    )


def _bucket_bytes(settings: Settings, has_gpus: bool) -> int:
    return (settings.weights.bucket_mb or 0) << 20 or BUCKET_BYTES["cuda" if has_gpus else "cpu"]


def _place_roles(
    ranks: Processes, servers: Processes, nodes: tuple[Node, ...], settings: Settings
) -> tuple[Processes, Processes]:
    """Return both with the node of each process. Raises: SettingsError with everything that does not fit."""
    for_ranks, for_servers = _requests(ranks, servers, settings)
    shortages = count_shortages(for_ranks, for_servers, nodes, settings)
    if not shortages:
        together = settings.placement.is_colocated and servers.count > 0
        found = (assign_together if together else assign)(for_ranks, for_servers, nodes)
        if found is None:
            shortages = placing_shortages(for_ranks, for_servers, nodes, together=together)
        else:
            ranks, servers = replace(ranks, places=tuple(found[0])), replace(servers, places=tuple(found[1]))
            shortages = host_memory_shortages(ranks, servers) or loading_shortages(ranks)
    has_reference = needs_reference(settings) and not is_reference_the_base(settings)
    is_whole = zero_stage_of(settings.learner.zero_stage, settings.policy.dtype) != 3
    whole = "reference" if has_reference and is_whole else ""
    refuse([*shortages, *gpu_memory_shortages(ranks, nodes, whole), *gpu_memory_shortages(servers, nodes)])
    return ranks, servers


def _place_pairs(
    ranks: Processes, servers: Processes, nodes: tuple[Node, ...], settings: Settings
) -> tuple[Processes, Processes]:
    """Return both, each server on the node of the ranks that it takes turns with. Raises: as `_place_roles`."""
    size = settings.rollout.tensor_parallel_size
    request, _ = _requests(ranks, servers, settings)
    request = replace(
        request,
        count=servers.count,
        gpus=request.gpus * size,
        per_node=request.per_node and request.per_node // size,
        resources={name: amount * size for name, amount in request.resources.items()},
    )
    no_servers = replace(request, role=f"{_SERVER}s", setting="placement.servers", count=0)
    shortages: list[Shortage] = count_shortages(request, no_servers, nodes, settings)
    found = None if shortages else place(request, FreeCapacity(nodes))
    if found is None:
        refuse(shortages or placing_shortages(request, no_servers, nodes, together=False))
    servers = replace(servers, places=tuple(found or ()))
    ranks = replace(ranks, places=tuple(node for node in servers.places for _ in range(size)))
    refuse(shared_device_shortages(ranks, servers))
    return ranks, servers


def _requests(ranks: Processes, servers: Processes, settings: Settings) -> tuple[RoleRequest, RoleRequest]:
    placement = settings.placement
    return (
        _request("placement.ranks", ranks, placement.ranks, 1),
        _request("placement.servers", servers, placement.servers, settings.rollout.tensor_parallel_size),
    )


def _request(setting: str, processes: Processes, placed: RankPlacement, gpus_each: int) -> RoleRequest:
    return RoleRequest(
        role=f"{processes.role}s",
        setting=setting,
        count=processes.count,
        gpus=processes.num_gpus,
        strategy=placed.strategy,
        num_nodes=placed.nodes,
        gpus_per_node=placed.gpus_per_node,
        per_node=processes_per_node(placed, processes.count, gpus_each) if processes.count else None,
        resources=processes.resources,
    )


def _window_bytes(settings: Settings) -> int:
    """9 bytes a token: id, logprob and mask; at most the whole context for every sample in the window."""
    groups = (settings.learner.max_staleness + 1) * settings.learner.groups_per_step
    return groups * settings.rollout.group_size * settings.rollout.max_context_tokens * 9
