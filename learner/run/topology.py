"""The plan of a run's processes: what settings ask for, on what a cluster has. `--plan` prints it, launching obeys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from learner.disk.model_folder import BYTES
from learner.objectives.needs import needs_of
from learner.run.rank_memory import Sizes, rank_memory
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

Backend = Literal["nccl", "gloo"]
# Ray's names: DEFAULT fills one node before the next; SPREAD goes round the nodes; "here" is the command's own node.
Strategy = Literal["here", "DEFAULT", "SPREAD"]

_RANK = "learner rank"
_SERVER = "rollout server"


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, as Ray tells."""

    node_ip: str  # its address for the other nodes
    num_gpus: int  # 0: none


@dataclass(frozen=True)
class Processes:
    """Processes of one role."""

    role: str  # for people
    count: int  # of them; 0: the run needs none
    num_gpus: int  # of each
    strategy: Strategy  # where they are placed
    memory_bytes: int  # of each on its device, as far as it is known beforehand
    besides: str  # what comes on top
    host_bytes: int = 0  # of each in the host's memory beside a GPU's


@dataclass(frozen=True)
class Topology:
    """All processes of a run."""

    coordinator: Processes  # one, beside the command
    ranks: Processes  # learner.num_ranks of them
    servers: Processes  # rollout.num_servers of them; none where nothing is sampled
    backend: Backend  # how weights travel

    @property
    def has_gpus(self) -> bool:
        """True when learner ranks have a GPU each."""
        return self.ranks.num_gpus > 0


def plan_topology(settings: Settings, sizes: Sizes, nodes: Sequence[Node] | None) -> Topology:
    """Return which processes a run has, with which GPUs and where.

    sizes: of its models. nodes: of the running cluster; None when none runs: then GPUs are planned unless weights
    travel by gloo.
    Raises: SettingsError when the cluster cannot hold them, or weights cannot travel as asked.
    """
    rollout = settings.rollout
    num_gpus = None if nodes is None else sum(node.num_gpus for node in nodes)
    backend = choose_backend(settings.weights.backend, num_gpus)
    if settings.weights.second_copy and backend == "nccl" and (num_gpus or settings.weights.backend == "nccl"):
        raise SettingsError(
            "settings: weights.second_copy = true needs weights.backend = gloo: over nccl a push is loaded as it "
            "comes. Leave second_copy out."
        )
    has_gpus = backend == "nccl" if num_gpus is None else num_gpus > 0
    server_bytes = sizes.policy.parameters * BYTES[settings.policy.dtype] // rollout.tensor_parallel_size
    num_servers = rollout.num_servers if needs_of(settings).rollouts else 0
    topology = Topology(
        coordinator=Processes("coordinator", 1, 0, "here", _window_bytes(settings), "for the window"),
        ranks=_ranks(settings, sizes, has_gpus),
        servers=Processes(
            _SERVER, num_servers, rollout.tensor_parallel_size if has_gpus else 0, "SPREAD", server_bytes, "+ KV cache"
        ),
        backend=backend,
    )
    if nodes is not None:
        _check_room(topology, nodes, settings)
    return topology


def choose_backend(wanted: str, num_gpus: int | None) -> Backend:
    """Return how weights travel; num_gpus: None while no cluster runs.

    Raises: SettingsError when the cluster cannot do what was asked for.
    """
    if wanted == "ipc":
        raise SettingsError(
            "settings: weights.backend = ipc needs learner and engine on one GPU; Sluice places them apart. "
            "Use auto or nccl."
        )
    if wanted == "nccl" and num_gpus == 0:
        raise SettingsError("settings: weights.backend = nccl needs GPUs, and this cluster has none. Use auto or gloo.")
    if wanted == "auto":
        return "gloo" if num_gpus == 0 else "nccl"
    return "nccl" if wanted == "nccl" else "gloo"


def _ranks(settings: Settings, sizes: Sizes, has_gpus: bool) -> Processes:
    memory = rank_memory(settings, sizes)
    besides = "with activations" if sizes.policy.num_layers else "+ activations"
    on_device, on_host = (memory.device, memory.host) if has_gpus else (memory.device + memory.host, 0)
    return Processes(_RANK, settings.learner.num_ranks, int(has_gpus), "DEFAULT", on_device, besides, on_host)


def _check_room(topology: Topology, nodes: Sequence[Node], settings: Settings) -> None:
    """Raise SettingsError for more GPUs than there are: Ray would wait for them until a deadline.

    A server's GPUs are of one node; ranks take what the servers leave.
    """
    ranks, servers, rollout = topology.ranks, topology.servers, settings.rollout
    needed = ranks.count * ranks.num_gpus + servers.count * servers.num_gpus
    present = sum(node.num_gpus for node in nodes)
    asked = (
        f"learner.num_ranks = {ranks.count} and rollout.num_servers = {rollout.num_servers} with "
        f"rollout.tensor_parallel_size = {rollout.tensor_parallel_size}"
    )
    if needed > present:
        raise SettingsError(f"settings: {asked} need {needed} GPUs; the cluster has {present}. Lower one of them.")
    if not servers.num_gpus:
        return
    places = sum(node.num_gpus // servers.num_gpus for node in nodes)
    if servers.count > places:
        each = ", ".join(str(node.num_gpus) for node in nodes)
        raise SettingsError(
            f"settings: rollout.num_servers = {servers.count} with rollout.tensor_parallel_size = {servers.num_gpus} "
            f"fit {places} times on nodes with {each} GPUs: a server's GPUs are of one node. Lower one of them."
        )


def _window_bytes(settings: Settings) -> int:
    """9 bytes a token: id, logprob and mask; at most the whole context for every sample in the window."""
    groups = (settings.learner.max_staleness + 1) * settings.learner.groups_per_step
    return groups * settings.rollout.group_size * settings.rollout.max_context_tokens * 9
