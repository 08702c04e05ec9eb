"""Plans that contradict their cluster: each is refused in one sentence before anything starts."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from learner.disk.model_folder import ModelSize
from learner.plan.memory import Sizes
from learner.plan.processes import Node
from learner.plan.topology import plan_topology
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

_FOUR_EIGHTS = [Node(f"10.0.0.{number}", 8) for number in range(1, 5)]
_TWO_FOURS = [Node("10.0.0.1", 4), Node("10.0.0.2", 4)]
_NO_GPUS = [Node("10.0.0.1", 0), Node("10.0.0.2", 0)]
_NAMED = [
    Node("10.0.0.1", 8, resources={"h100": 8.0}),
    Node("10.0.0.2", 8, resources={"a100": 8.0}),
    Node("10.0.0.3", 8),
]
_CARDS = [Node("10.0.0.1", 8, gpu_bytes=24 * 10**9)]


@dataclass(frozen=True)
class Wrong:
    """A plan that must be refused."""

    placement: dict[str, Any]  # its settings
    says: str  # the whole sentence
    nodes: list[Node] = field(default_factory=lambda: _FOUR_EIGHTS)  # of the cluster
    num_ranks: int = 8
    num_servers: int = 4
    tensor_parallel_size: int = 2
    backend: str = "auto"
    engine_args: dict[str, Any] = field(default_factory=dict)
    learner: dict[str, Any] = field(default_factory=dict)
    parameters: int = 1000  # of the model


PLANS = [
    Wrong(
        {"devices": "shared"},
        "settings: learner ranks need 64 GPUs (learner.num_ranks = 64); the cluster has 32 GPUs. Lower it.",
        num_ranks=64,
        num_servers=64,
        tensor_parallel_size=1,
        learner={"groups_per_step": 64},
    ),
    Wrong(
        {"ranks": {"nodes": 8}},
        "settings: learner ranks need 8 nodes (placement.ranks.nodes); the cluster has 4. Lower it, or have more "
        "nodes join (sluice start --join).",
    ),
    Wrong(
        {"ranks": {"gpus_per_node": 8}},
        "settings: the cluster cannot hold this run, for 2 reasons:\n- learner ranks need 8 GPUs on a node "
        "(placement.ranks.gpus_per_node); the largest node has 4 GPUs. Lower it.\n- learner ranks and rollout "
        "servers need 16 GPUs (learner.num_ranks = 8, rollout.num_servers = 4, rollout.tensor_parallel_size = "
        "2); the cluster has 8 GPUs. Lower one of these.",
        nodes=_TWO_FOURS,
    ),
    Wrong(
        {"servers": {"gpus_per_node": 2}},
        "settings: rollout servers need 2 GPUs on a node (placement.servers.gpus_per_node); the cluster has no "
        "GPUs. Remove it, or use a cluster with GPUs.",
        nodes=_NO_GPUS,
    ),
    Wrong(
        {"servers": {"gpus": 0.5}},
        "settings: rollout servers need 0.5 of a GPU each (placement.servers.gpus); the cluster has no GPUs. "
        "Remove it, or use a cluster with GPUs.",
        nodes=_NO_GPUS,
        tensor_parallel_size=1,
        backend="gloo",
        engine_args={"gpu_memory_utilization": 0.4},
    ),
    Wrong(
        {"ranks": {"resources": {"b200": 1}}},
        "settings: learner ranks need 1 b200 each (placement.ranks.resources); the cluster has no b200, only "
        "a100, h100. Start its nodes with sluice start --resources '{\"b200\": 1}', or remove it.",
        nodes=_NAMED,
    ),
    Wrong(
        {"ranks": {"resources": {"h100": 9}}},
        "settings: learner ranks need 9 h100 each (placement.ranks.resources); the largest node has 8. Lower it.",
        nodes=_NAMED,
    ),
    Wrong(
        {"ranks": {"resources": {"h100": 1}}},
        "settings: learner ranks need 16 places (placement.ranks: h100 = 1 each); the cluster, with 8, 8, 8 GPUs "
        "and 8, 0, 0 h100, has too few that fit. Lower placement.ranks.resources, or have more nodes join "
        "(sluice start --join).",
        nodes=_NAMED,
        num_ranks=16,
        num_servers=1,
    ),
    Wrong(
        {"ranks": {"resources": {"h100": 1}}, "servers": {"resources": {"h100": 1}}},
        "settings: learner ranks and rollout servers need 8 and 4 places together (placement.ranks: h100 = 1 "
        "each; placement.servers: h100 = 1 each); the cluster has 8, 8, 8 GPUs. Change one of the two.",
        nodes=_NAMED,
        tensor_parallel_size=1,
    ),
    Wrong(
        {"ranks": {"nodes": 1}, "colocate": [["servers", "ranks"]]},
        "settings: learner ranks and rollout servers need 8 and 4 places on the same nodes (placement.ranks: "
        "nodes = 1; placement.servers); the cluster has 8, 8, 8, 8 GPUs. Change one of the two, or remove "
        "placement.colocate.",
    ),
    Wrong(
        {},
        "settings: learner ranks and rollout servers need 16 GPUs (learner.num_ranks = 8, rollout.num_servers = "
        "4, rollout.tensor_parallel_size = 2); the cluster has 8 GPUs. Lower one of these.",
        nodes=_TWO_FOURS,
    ),
    Wrong(
        {},
        "settings: rollout servers need 1 times 5 GPUs of one node (rollout.num_servers, "
        "rollout.tensor_parallel_size); the cluster, with 4, 4 GPUs, has room for 0. Lower one of these.",
        nodes=_TWO_FOURS,
        num_ranks=1,
        num_servers=1,
        tensor_parallel_size=5,
    ),
    Wrong(
        {},
        "settings: learner ranks need 126.0 GB of weights and optimizer on each GPU; 10.0.0.1 has 24 GB a GPU. "
        "Raise learner.num_ranks or learner.zero_stage, or set learner.offload.",
        nodes=_CARDS,
        num_ranks=1,
        num_servers=1,
        parameters=7 * 10**9,
    ),
    Wrong(
        {},
        "settings: rollout servers need 28.0 GB of weights on each GPU; 10.0.0.1 has 24 GB a GPU. Raise "
        "rollout.tensor_parallel_size, or set placement.servers.gpus to 1.",
        nodes=_CARDS,
        num_ranks=4,
        num_servers=1,
        tensor_parallel_size=1,
        learner={"zero_stage": 3, "offload": "all"},
        parameters=14 * 10**9,
    ),
    Wrong(
        {"ranks": {"nodes": 1}},
        "settings: learner ranks and rollout servers need 264 GB of host memory: 4 ranks with 264 GB and 1 "
        "servers with 0 GB; 10.0.0.1 has 100 GB. Set placement.ranks.nodes or placement.servers.nodes to more "
        "nodes, or offload less (learner.offload).",
        nodes=[Node(f"10.0.0.{number}", 8, host_bytes=100 * 10**9) for number in (1, 2)],
        num_ranks=4,
        num_servers=1,
        learner={"zero_stage": 3, "offload": "all"},
        parameters=12 * 10**9,
    ),
    Wrong(
        {},
        "settings: learner ranks and rollout servers need 1120 GB of host memory: 0 ranks with 0 GB and 1 "
        "servers with 1120 GB; 10.0.0.2 has 1000 GB. Set placement.ranks.nodes or placement.servers.nodes to "
        "more nodes, or set weights.second_copy to false.",
        nodes=[Node(f"10.0.0.{number}", 8, host_bytes=10**12) for number in (1, 2, 3, 4)],
        num_ranks=8,
        num_servers=1,
        tensor_parallel_size=8,
        backend="gloo",
        learner={"zero_stage": 3},
        parameters=70 * 10**9,
    ),
    Wrong(
        {},
        "settings: learner ranks and rollout servers need 1820 GB of host memory: 1 ranks with 1260 GB and 2 "
        "servers with 560 GB; 10.0.0.1 has 256 GB. Set placement.ranks.nodes or placement.servers.nodes to more "
        "nodes, or set weights.second_copy to false.",
        nodes=[Node("10.0.0.1", 0, host_bytes=256 * 10**9)],
        num_ranks=1,
        num_servers=2,
        tensor_parallel_size=1,
        parameters=70 * 10**9,
    ),
]


@pytest.mark.parametrize("wrong", PLANS, ids=lambda wrong: wrong.says.removeprefix("settings: ")[:60])
def test_a_plan_that_contradicts_its_cluster_is_refused(wrong: Wrong) -> None:
    given = {
        "learner": {"num_ranks": wrong.num_ranks, **wrong.learner},
        "rollout": {
            "num_servers": wrong.num_servers,
            "tensor_parallel_size": wrong.tensor_parallel_size,
            "engine_args": wrong.engine_args,
        },
        "weights": {"backend": wrong.backend},
        "placement": wrong.placement,
    }
    with pytest.raises(SettingsError) as caught:
        plan_topology(Settings.model_validate(given), Sizes(ModelSize(wrong.parameters)), wrong.nodes)
    assert str(caught.value) == wrong.says
