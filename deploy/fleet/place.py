"""Where Ray is to start an actor: its node, and what it takes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_BYTES = 1


@dataclass(frozen=True)
class Place:
    """One actor's."""

    node_id: str | None  # Ray's name of the node; None: any that has room
    num_gpus: float  # that it takes; below 1: a share of one
    resources: Mapping[str, float] = field(default_factory=dict)  # of the names that nodes were given

    def options(self, strategy: str = "DEFAULT") -> dict[str, Any]:
        """Return Ray's options. strategy: Ray's own, where no node is named.

        Soft: on another node with room once this one is gone, since Ray starts a server again by itself. While the
        node lives Ray waits for room there.
        """
        node = self.node_id and NodeAffinitySchedulingStrategy(self.node_id, soft=True)
        return {
            "num_gpus": self.num_gpus,
            # An actor that takes nothing at all is started by Ray wherever it likes, whatever node is named.
            "memory": _BYTES,
            "resources": dict(self.resources) or None,
            "scheduling_strategy": node or strategy,
        }

    def __str__(self) -> str:
        """Return " on node IP"; nothing where no node is named, or Ray knows it no more."""
        known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()} if self.node_id else {}
        return f" on node {known[self.node_id]}" if self.node_id in known else ""

    def is_of(self, node_id: str | None, assigned: Mapping[str, float]) -> bool:
        """Return whether an actor is in such a place. node_id: where it is. assigned: what Ray says that it has."""
        wanted = {name: amount for name, amount in {"GPU": self.num_gpus, **self.resources}.items() if amount}
        return self.node_id in (None, node_id) and dict(assigned) == wanted


def places(
    count: int, num_gpus: float, nodes: Sequence[str] | None, resources: Mapping[str, float] | None
) -> list[Place]:
    """Return a place for each of `count` actors. nodes: one for each; None or empty: Ray chooses."""
    taken = dict(resources or {})
    return [Place(node or None, num_gpus, taken) for node in (nodes or [""] * count)]


def this_node() -> str:
    """Return Ray's name of the node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def assigned_here() -> dict[str, float]:
    """Return what this actor takes of its node, as Ray counts it; CPUs and memory, which are not planned, left out."""
    assigned = ray.get_runtime_context().get_assigned_resources()
    return {name: float(amount) for name, amount in assigned.items() if amount and name not in ("CPU", "memory")}
