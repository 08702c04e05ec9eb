"""Settings of a run's placement: nodes and GPUs of each role, resources of nodes, roles on the same nodes."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, PositiveFloat, field_validator, model_validator

from protocol.settings.learner import LearnerSettings
from protocol.settings.rollout import RolloutSettings
from protocol.settings.run import WeightsSettings
from protocol.settings.section import CountAboveZero, Section

Strategy = Literal["packed", "spread"]
Role = Literal["ranks", "servers", "critic", "reference"]
Devices = Literal["auto", "split", "shared"]
_PARTS = 10_000  # smallest share of a resource that Ray counts: 1 / _PARTS

# Resources that Ray counts itself, with options of their own.
OWN_NAMES = ("CPU", "GPU", "memory", "object_store_memory")
MOST_OF_A_RESOURCE = 1e9  # amount on a node; Ray's count of parts ends at 2**63


def _in_parts_of_ray(amount: float) -> float:
    """Return an amount rounded as Ray counts it. Raises: ValueError for an amount that Ray cannot count."""
    if amount < 1 / _PARTS:
        raise ValueError(f"{amount:g} is less than {1 / _PARTS:g}, the smallest part that Ray counts. Give more.")
    return int(amount * _PARTS + 1e-6) / _PARTS


def is_name_of_ray(name: str) -> bool:
    """Return whether Ray counts the resource of this name itself."""
    return name in OWN_NAMES or name.startswith(("node:", "accelerator_type:"))


def without_names_of_ray(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that the node's operator named, of all that Ray counts there."""
    return {name: amount for name, amount in resources.items() if not is_name_of_ray(name)}


def refuse_names_of_ray(names: Iterable[str]) -> None:
    """Raise ValueError for the first resource that Ray counts itself."""
    for name in names:
        if is_name_of_ray(name):
            raise ValueError(
                f"{name} is a resource that Ray counts itself. Use names of your own, given to "
                "sluice start --resources on the nodes that have them."
            )


class RankPlacement(Section):
    """Placement of learner ranks, with the policy, the critic and the reference on them."""

    nodes: CountAboveZero | None = Field(
        None,
        description="Nodes, each with as many processes; null: as few as possible (packed), or all (spread).",
    )
    gpus_per_node: CountAboveZero | None = Field(None, description="GPUs used on each node; null: any number.")
    strategy: Strategy = Field("packed", description="packed: as few nodes as hold them; spread: over all nodes.")
    resources: dict[str, PositiveFloat] = Field(
        {}, description="Resources of one process: name from sluice start --resources -> amount."
    )

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, value: dict[str, float]) -> dict[str, float]:
        refuse_names_of_ray(value)
        return {name: _in_parts_of_ray(each) for name, each in value.items()}


class ServerPlacement(RankPlacement):
    """Placement of rollout servers."""

    strategy: Strategy = Field("spread", description="packed: as few nodes as hold them; spread: over all nodes.")
    gpus: Annotated[PositiveFloat, Field(le=1.0), AfterValidator(_in_parts_of_ray)] = Field(
        1.0, description="GPU share of a server; below 1 several servers share a GPU, with weights.backend gloo."
    )


class PlacementSettings(Section):
    devices: Devices = Field(
        "auto",
        description="split: ranks and servers use different GPUs; shared: a rank and a server take turns on each GPU; "
        "auto: shared for one rank and one server on a cluster with one GPU, else split.",
    )
    ranks: RankPlacement = RankPlacement()
    servers: ServerPlacement = ServerPlacement()
    colocate: list[tuple[Role, Role]] = Field(
        [], description="Pairs of ranks and servers on the same nodes; critic and reference are always the ranks'."
    )

    @field_validator("colocate", mode="before")
    @classmethod
    def _check_pairs(cls, value: Any) -> Any:
        roles = get_args(Role)
        for pair in value if isinstance(value, list | tuple) else ():
            if not isinstance(pair, list | tuple) or len(pair) != 2 or pair[0] == pair[1]:
                raise ValueError(f"{pair!r} is not a pair of two roles. Give pairs such as [[ranks, servers]].")
            if unknown := [role for role in pair if role not in roles]:
                raise ValueError(f"{unknown[0]} is not a role. Expected one of {', '.join(roles)}.")
        return value

    @property
    def is_colocated(self) -> bool:
        """True when servers must run on the ranks' nodes."""
        on_ranks = {"ranks", "critic", "reference"}
        return any("servers" in pair and on_ranks & set(pair) for pair in self.colocate)

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        ranks, servers = self.ranks, self.servers
        if self.is_colocated and None not in (ranks.nodes, servers.nodes) and ranks.nodes != servers.nodes:
            raise ValueError(
                f"placement.colocate puts ranks and servers on the same nodes, and ranks.nodes = {ranks.nodes} is not "
                f"servers.nodes = {servers.nodes}. Give both one number, or remove the pair."
            )
        return self


def check_placement(
    placement: PlacementSettings, learner: LearnerSettings, rollout: RolloutSettings, weights: WeightsSettings
) -> None:
    """Raise ValueError where nodes and GPUs do not fit a role's number of processes, or servers cannot share GPUs."""
    _check_shape("placement.ranks", placement.ranks, f"learner.num_ranks = {learner.num_ranks}", learner.num_ranks, 1)
    size = rollout.tensor_parallel_size
    if placement.devices == "shared":
        _check_turns(placement, learner, rollout, weights)
    _check_shared_gpu(placement.servers, rollout, weights)
    whole = f"rollout.num_servers = {rollout.num_servers}"
    _check_shape("placement.servers", placement.servers, whole, rollout.num_servers, size)


def can_take_turns(
    placement: PlacementSettings, learner: LearnerSettings, rollout: RolloutSettings, weights: WeightsSettings
) -> bool:
    """Return whether these settings have one rank and one server that could take turns on one GPU."""
    try:
        _check_turns(placement, learner, rollout, weights)
    except ValueError:
        return False
    return learner.num_ranks == 1


def processes_per_node(placed: RankPlacement, count: int, gpus_each: int) -> int | None:
    """Return the number of a role's processes on each of its nodes; None where the settings do not fix it.

    gpus_each: whole GPUs of one process.
    """
    if placed.nodes is not None:
        return count // placed.nodes
    return None if placed.gpus_per_node is None else _fitting(placed, placed.gpus_per_node, gpus_each)


def servers_on_gpu(share: float) -> int:
    """Return the number of servers that fit on one GPU, each with this share."""
    return int(1.0 / share + 1e-9)


def _fitting(placed: RankPlacement, gpus: int, gpus_each: int) -> int:
    share = placed.gpus if isinstance(placed, ServerPlacement) else 1.0
    return gpus * servers_on_gpu(share) if share < 1.0 else gpus // gpus_each


def _check_shape(name: str, placed: RankPlacement, whole: str, count: int, gpus_each: int) -> None:
    """Raise ValueError where `count` processes do not fill these nodes and GPUs evenly."""
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
            f"{name}.gpus_per_node = {gpus} is not a multiple of rollout.tensor_parallel_size = {gpus_each}: a "
            "server's GPUs are of one node. Change one."
        )
    fit = _fitting(placed, gpus, gpus_each)
    if nodes is None and count % fit:
        raise ValueError(
            f"{name}.gpus_per_node = {gpus} holds {fit} processes on each node, and {whole} is not a multiple of it. "
            "Change one."
        )
    if nodes is not None and nodes * fit != count:
        raise ValueError(
            f"{name}.nodes = {nodes} with {name}.gpus_per_node = {gpus} hold {nodes * fit} processes, and {whole}. "
            "Change one of the three."
        )


def _check_turns(
    placement: PlacementSettings, learner: LearnerSettings, rollout: RolloutSettings, weights: WeightsSettings
) -> None:
    """Raise ValueError where ranks and servers cannot take turns on GPUs."""
    name, servers, size = "placement.devices = shared", placement.servers, rollout.tensor_parallel_size
    if rollout.num_servers * size != learner.num_ranks:
        raise ValueError(
            f"{name} has a rank on each of a server's GPUs, and learner.num_ranks = {learner.num_ranks} is not "
            f"rollout.num_servers = {rollout.num_servers} times rollout.tensor_parallel_size = {size}. Change one."
        )
    if (per_node := processes_per_node(placement.ranks, learner.num_ranks, 1)) and per_node % size:
        raise ValueError(
            f"{name}, and placement.ranks puts {per_node} ranks on a node, which is not a multiple of "
            f"rollout.tensor_parallel_size = {size}: a server's GPUs are of one node. Change one."
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
    """Raise ValueError where servers cannot share a GPU."""
    share = servers.gpus
    if share == 1.0:
        return
    name = f"placement.servers.gpus = {share:g}"
    if rollout.tensor_parallel_size > 1:
        raise ValueError(
            f"{name} is a share of one GPU, and rollout.tensor_parallel_size = {rollout.tensor_parallel_size} gives "
            "each server whole ones. Set one to 1."
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
