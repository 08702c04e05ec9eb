"""Settings of where a run's processes are placed: nodes, GPUs of each, names that nodes have, pairs on one node."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, PositiveFloat, field_validator, model_validator

from protocol.settings.learner import LearnerSettings
from protocol.settings.rollout import RolloutSettings
from protocol.settings.section import CountAboveZero, Section
from protocol.settings.weights import WeightsSettings

Strategy = Literal["packed", "spread"]
Role = Literal["ranks", "servers", "critic", "reference"]
Devices = Literal["auto", "split", "shared"]
# Ray counts whole ones in so many parts: what is less than one of them it refuses when a process is started.
_PARTS = 10_000

_NOT_PLACED = {
    "critic": "the critic lives on the learner's ranks: placement.ranks places both. Remove it",
    "reference": "the reference lives on the learner's ranks: placement.ranks places both. Remove it",
    "reward_models": "reward models are services that runs ask, and no run starts them. Start each on the node it is "
    "meant for, keep its GPUs from Ray there (start_cluster.sh --num-gpus), and name it in rewards.endpoints",
}
# What Ray counts by itself, and has options of its own.
OWN_NAMES = ("CPU", "GPU", "memory", "object_store_memory")
MOST_OF_A_RESOURCE = 1e9  # on a node; Ray's count of its parts ends at 2**63


def _in_parts_of_ray(amount: float) -> float:
    """Return an amount as Ray will count it. Raises: ValueError for one that is too small to be counted."""
    if amount < 1 / _PARTS:
        raise ValueError(f"{amount:g} is less than {1 / _PARTS:g}, the smallest part that Ray counts. Give more.")
    return int(amount * _PARTS + 1e-6) / _PARTS


def is_name_of_ray(name: str) -> bool:
    """Return whether Ray counts a resource of this name by itself."""
    return name in OWN_NAMES or name.startswith(("node:", "accelerator_type:"))


def without_names_of_ray(resources: Mapping[str, float]) -> dict[str, float]:
    """Return what a node has by names that its operator gave, of all that Ray counts there."""
    return {name: amount for name, amount in resources.items() if not is_name_of_ray(name)}


def refuse_names_of_ray(names: Iterable[str]) -> None:
    """Raise ValueError for the first resource that Ray counts by itself."""
    for name in names:
        if is_name_of_ray(name):
            raise ValueError(
                f"{name} is what Ray counts by itself. Use names of your own, given to start_cluster.sh "
                "--resources on the nodes that are meant."
            )


class RankPlacement(Section):
    """Where learner ranks go, with the policy, the critic and the reference on them."""

    nodes: CountAboveZero | None = Field(
        None, description="Nodes, of which each gets as many; null: as few as hold them all (packed), or all (spread)."
    )
    gpus_per_node: CountAboveZero | None = Field(None, description="GPUs of each of its nodes; null: as they fit.")
    strategy: Strategy = Field("packed", description="packed: as few nodes as hold them; spread: over all nodes.")
    resources: dict[str, PositiveFloat] = Field(
        {}, description="What each process takes of what its node has by start_cluster.sh --resources."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_shared_gpu(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "gpus" in given and "gpus" not in cls.model_fields:
            raise ValueError(
                f"gpus = {given['gpus']}: a learner rank has one whole GPU, since NCCL takes each GPU once. Remove it; "
                "for less memory on each, raise learner.num_ranks."
            )
        return given

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, value: dict[str, float]) -> dict[str, float]:
        refuse_names_of_ray(value)
        return {name: _in_parts_of_ray(each) for name, each in value.items()}


class ServerPlacement(RankPlacement):
    """Where rollout servers go."""

    strategy: Strategy = Field("spread", description="packed: as few nodes as hold them; spread: over all nodes.")
    gpus: Annotated[PositiveFloat, Field(le=1.0), AfterValidator(_in_parts_of_ray)] = Field(
        1.0, description="Share of one GPU that a server takes; below 1 several share it, with weights.backend gloo."
    )


class PlacementSettings(Section):
    devices: Devices = Field(
        "auto",
        description="split: ranks and servers have GPUs of their own; shared: each rank and a server take turns on "
        "one; auto: shared for one rank and one server on a cluster with one GPU, else split.",
    )
    ranks: RankPlacement = RankPlacement()  # learner ranks, and who lives on them
    servers: ServerPlacement = ServerPlacement()  # rollout servers
    colocate: list[tuple[Role, Role]] = Field(
        [], description="Pairs of ranks and servers on the same nodes; critic and reference are always the ranks'."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_roles_that_are_not_placed(cls, given: Any) -> Any:
        for role, why in _NOT_PLACED.items():
            if isinstance(given, Mapping) and role in given:
                raise ValueError(f"{role}: {why}.")
        return given

    @field_validator("colocate", mode="before")
    @classmethod
    def _refuse_pairs(cls, value: Any) -> Any:
        for pair in value if isinstance(value, list | tuple) else ():
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError(f"{pair!r} is no pair. Give pairs of roles, such as [[ranks, servers]].")
            for role in pair:
                if role not in get_args(Role):
                    why = _NOT_PLACED.get(str(role), f"it is none of {', '.join(get_args(Role))}. Use one of them")
                    raise ValueError(f"{role}: {why}.")
            if pair[0] == pair[1]:
                raise ValueError(f"{pair[0]} with {pair[1]} is one role. Give two roles, or leave the pair out.")
        return value

    @property
    def is_colocated(self) -> bool:
        """True when servers are to be on the nodes of the ranks."""
        on_ranks = {"ranks", "critic", "reference"}
        return any("servers" in pair and on_ranks & set(pair) for pair in self.colocate)

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        ranks, servers = self.ranks, self.servers
        if self.is_colocated and None not in (ranks.nodes, servers.nodes) and ranks.nodes != servers.nodes:
            raise ValueError(
                f"colocate puts ranks and servers on the same nodes, and ranks.nodes = {ranks.nodes} is not "
                f"servers.nodes = {servers.nodes}. Give both one number, or remove the pair."
            )
        return self


def check_placement(
    placement: PlacementSettings, learner: LearnerSettings, rollout: RolloutSettings, weights: WeightsSettings
) -> None:
    """Raise ValueError where a role's nodes and GPUs do not make its processes, or servers cannot share a GPU so."""
    _check_shape("placement.ranks", placement.ranks, f"learner.num_ranks = {learner.num_ranks}", learner.num_ranks, 1)
    size = rollout.tensor_parallel_size
    if placement.devices == "shared":
        _check_turns(placement.servers, learner, rollout, weights)
    _check_shared_gpu(placement.servers, rollout, weights)
    whole = f"rollout.num_servers = {rollout.num_servers}"
    _check_shape("placement.servers", placement.servers, whole, rollout.num_servers, size)


def can_take_turns(
    placement: PlacementSettings, learner: LearnerSettings, rollout: RolloutSettings, weights: WeightsSettings
) -> bool:
    """Return whether these settings have one rank and one server, which could take turns on one GPU."""
    try:
        _check_turns(placement.servers, learner, rollout, weights)
    except ValueError:
        return False
    return learner.num_ranks == 1


def processes_per_node(placed: RankPlacement, count: int, gpus_each: int) -> int | None:
    """Return how many processes of a role the settings put on each of its nodes; None where they leave it open.

    gpus_each: of one process, where it has whole ones.
    """
    if placed.nodes is not None:
        return count // placed.nodes
    return None if placed.gpus_per_node is None else _fitting(placed, placed.gpus_per_node, gpus_each)


def servers_on_gpu(share: float) -> int:
    """Return how many servers that take this share of a GPU fit on one."""
    return int(1.0 / share + 1e-9)


def _fitting(placed: RankPlacement, gpus: int, gpus_each: int) -> int:
    share = placed.gpus if isinstance(placed, ServerPlacement) else 1.0
    return gpus * servers_on_gpu(share) if share < 1.0 else gpus // gpus_each


def _check_shape(name: str, placed: RankPlacement, whole: str, count: int, gpus_each: int) -> None:
    """Raise ValueError where these nodes of so many GPUs do not hold `count` processes, each as many."""
    nodes, gpus = placed.nodes, placed.gpus_per_node
    if nodes is not None and count % nodes:
        divisors = [number for number in range(1, count + 1) if count % number == 0]
        raise ValueError(
            f"{name}.nodes = {nodes} cannot hold {whole} evenly. Set the first to one of {divisors}, or change the "
            "second."
        )
    if gpus is None:
        return
    if gpus % gpus_each:
        raise ValueError(
            f"{name}.gpus_per_node = {gpus} is no multiple of rollout.tensor_parallel_size = {gpus_each}: a server's "
            "GPUs are of one node. Change one of them."
        )
    fit = _fitting(placed, gpus, gpus_each)
    if nodes is None and count % fit:
        raise ValueError(
            f"{name}.gpus_per_node = {gpus} holds {fit} processes on each node, and {whole} is no multiple of it. "
            "Change one of them."
        )
    if nodes is not None and nodes * fit != count:
        raise ValueError(
            f"{name}.nodes = {nodes} with {name}.gpus_per_node = {gpus} hold {nodes * fit} processes, and {whole}. "
            "Change one of the three."
        )


def _check_turns(
    servers: ServerPlacement, learner: LearnerSettings, rollout: RolloutSettings, weights: WeightsSettings
) -> None:
    """Raise ValueError for ranks and servers that cannot take turns on GPUs."""
    name = "placement.devices = shared"
    if rollout.num_servers != learner.num_ranks:
        raise ValueError(
            f"{name} gives each rank one server to take turns with, and learner.num_ranks = {learner.num_ranks} is not "
            f"rollout.num_servers = {rollout.num_servers}. Set both to one number."
        )
    if rollout.tensor_parallel_size > 1:
        raise ValueError(
            f"{name} has a rank and a server on one GPU, and rollout.tensor_parallel_size = "
            f"{rollout.tensor_parallel_size} gives a server several. Set it to 1, or placement.devices to split."
        )
    if weights.backend == "nccl":
        raise ValueError(
            f"{name}, and weights.backend = nccl takes each GPU once. Set weights.backend to auto, or "
            "placement.devices to split."
        )
    given = [field for field in ("nodes", "gpus_per_node", "resources") if getattr(servers, field)]
    given += ["gpus"] if servers.gpus != 1.0 else []
    if given:
        raise ValueError(
            f"{name} has each server where its rank is, and placement.servers.{given[0]} is given. Remove it; "
            "placement.ranks places both."
        )


def _check_shared_gpu(servers: ServerPlacement, rollout: RolloutSettings, weights: WeightsSettings) -> None:
    """Raise ValueError for servers that share a GPU and cannot."""
    share = servers.gpus
    if share == 1.0:
        return
    name = f"placement.servers.gpus = {share:g}"
    if rollout.tensor_parallel_size > 1:
        raise ValueError(
            f"{name} is a share of one GPU, and rollout.tensor_parallel_size = {rollout.tensor_parallel_size} gives "
            "each server whole ones. Set one of them to 1."
        )
    if weights.backend != "gloo":
        raise ValueError(
            f"{name} has servers share a GPU, and weights.backend = {weights.backend} travels by NCCL, which takes "
            "each GPU once. Set weights.backend to gloo, or the first to 1."
        )
    taken = rollout.engine_args.get("gpu_memory_utilization")
    if not isinstance(taken, int | float) or taken > share:
        raise ValueError(
            f"{name}, and an engine takes {'most' if taken is None else taken} of its GPU's memory. Set "
            f"rollout.engine_args.gpu_memory_utilization to {share:g} or less."
        )
