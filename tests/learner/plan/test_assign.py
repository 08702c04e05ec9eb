"""Which node each rank and each server gets."""

from typing import Any

import pytest

from learner.disk.model_folder import ModelSize
from learner.plan.memory import Sizes
from learner.plan.processes import Node, Topology
from learner.plan.shown import node_rows
from learner.plan.topology import plan_topology
from protocol.errors import SettingsError
from protocol.settings.placement import ServerPlacement, without_names_of_ray
from protocol.settings.settings import Settings


def nodes(*gpus: int, **resources: dict[str, float]) -> list[Node]:
    """Return nodes named 1, 2 ..; resources: by their names, n1, n2 .."""
    return [
        Node(str(number), count, node_id=str(number), resources=resources.get(f"n{number}", {}))
        for number, count in enumerate(gpus, start=1)
    ]


def asked(num_ranks: int, num_servers: int, size: int = 1, **placement: Any) -> Settings:
    given = {
        "learner": {"num_ranks": num_ranks, "groups_per_step": num_ranks},
        "rollout": {"num_servers": num_servers, "tensor_parallel_size": size},
        "placement": placement,
    }
    return Settings.model_validate(given)


def planned(on: list[Node], *counts: int, **placement: Any) -> Topology:
    return plan_topology(asked(*counts, **placement), Sizes(ModelSize(1000)), on)


def places(*given: Any, **placement: Any) -> tuple[str, str]:
    """Return the nodes of the ranks and of the servers, a digit each."""
    plan = planned(*given, **placement)
    ranks, servers = ("".join(node.node_ip for node in part.places) for part in (plan.ranks, plan.servers))
    return ranks, servers


_TOGETHER = [["ranks", "servers"]]
_APART = {"ranks": {"strategy": "spread"}, "colocate": _TOGETHER}


@pytest.mark.parametrize(
    ("gpus", "counts", "placement", "ranks_at", "servers_at"),
    [
        # ranks are packed, servers spread over the rest
        ((8, 8), (8, 4, 2), {}, "11111111", "2222"),
        ((8, 8), (2, 4), {}, "11", "1122"),
        # ranks on one node if it holds them, else on the largest nodes
        ((2, 8, 8), (6, 1), {}, "222222", "1"),
        ((2, 8, 4), (12, 1), {}, "222222223333", "1"),
        # servers first where ranks would leave them no node
        ((3, 3), (2, 2, 2), {}, "12", "12"),
        # a fixed count per node goes to nodes where the other role loses the fewest places
        ((4, 3), (3, 2, 2), {"ranks": {"nodes": 1}}, "222", "11"),
        ((6, 2, 2, 3), (3, 5, 2), {"ranks": {"gpus_per_node": 3}}, "444", "11123"),
        ((8, 5, 5, 4), (5, 4, 4), {"ranks": {"nodes": 1}}, "22222", "1134"),
        ((2, 3, 6, 8), (6, 4, 3), {"ranks": {"nodes": 3}}, "112244", "3344"),
        # a named number of nodes gets equal counts
        ((8, 8, 8, 8), (16, 4, 4), {"ranks": {"nodes": 2}, "servers": {"nodes": 2}}, "1" * 8 + "2" * 8, "3344"),
        ((8, 8), (4, 4), {"ranks": {"gpus_per_node": 2}}, "1122", "1122"),
        # the other strategies
        ((8, 8), (2, 2), {"ranks": {"strategy": "spread"}, "servers": {"strategy": "packed"}}, "12", "11"),
        # colocated roles share the fewest nodes, or are spread as the ranks are
        ((8, 8), (4, 2, 2), {"colocate": _TOGETHER}, "1111", "11"),
        ((8, 8, 8), (8, 4, 2), {"colocate": _TOGETHER}, "11112222", "1122"),
        ((8, 8, 8), (6, 6), {"servers": {"nodes": 3}, "colocate": [["servers", "critic"]]}, "112233", "112233"),
        ((8, 8, 8, 8), (4, 4), _APART, "1234", "1234"),
        ((8, 8, 8), (4, 2), _APART, "1122", "12"),
        ((8, 8, 1), (3, 3), _APART, "111", "111"),
    ],
)
def test_nodes_of_ranks_and_servers(
    gpus: tuple[int, ...], counts: tuple[int, ...], placement: dict[str, Any], ranks_at: str, servers_at: str
) -> None:
    assert places(nodes(*gpus), *counts, **placement) == (ranks_at, servers_at)


def test_a_role_is_on_nodes_with_its_custom_resources() -> None:
    on = nodes(8, 8, 8, n2={"h100": 8.0}, n3={"h100": 1.0})
    assert places(on, 2, 3, servers={"resources": {"h100": 1.0}}) == ("11", "223")


def test_critic_and_reference_with_the_ranks_say_what_is_so_anyway() -> None:
    alone, told = (
        places(nodes(8), 2, 1),
        places(nodes(8), 2, 1, colocate=[["ranks", "critic"], ["critic", "reference"]]),
    )
    assert alone == told


def test_servers_share_a_gpu_by_parts_of_it() -> None:
    given = {
        "learner": {"num_ranks": 1},
        "rollout": {"num_servers": 5, "engine_args": {"gpu_memory_utilization": 0.4}},
        "weights": {"backend": "gloo"},
        "placement": {"servers": {"gpus": 0.4, "strategy": "packed"}},
    }
    settings = Settings.model_validate(given)
    plan = plan_topology(settings, Sizes(ModelSize(1000)), nodes(2, 4))
    assert [node.node_ip for node in plan.servers.places] == ["2"] * 5
    assert plan.servers.num_gpus == 0.4


def test_without_gpus_ranks_are_on_the_head_and_servers_over_all_nodes() -> None:
    on = [Node("1", 0), Node("2", 0, is_head=True)]
    assert places(on, 2, 3) == ("22", "221")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_without_a_known_cluster_nothing_has_a_place(backend: str) -> None:
    plan = plan_topology(Settings.model_validate({"weights": {"backend": backend}}), Sizes(ModelSize(1000)), None)
    assert (plan.ranks.places, plan.servers.places, plan.nodes) == ((), (), ())


def test_gpus_that_servers_share_are_counted_as_they_are_taken() -> None:
    shared = {
        "rollout": {"num_servers": 5, "engine_args": {"gpu_memory_utilization": 0.4}},
        "weights": {"backend": "gloo"},
        "placement": {"servers": {"gpus": 0.4}},
    }
    settings = Settings.model_validate(shared)
    plan = plan_topology(settings, Sizes(ModelSize(1000)), nodes(4))
    ((_, gpus, *_, on_card),) = node_rows(plan)
    assert gpus == "4 of 4"  # a rank, and three GPUs of two servers each
    assert on_card == "rank 0.0, each of 2 servers 0.0 + KV cache GB; host 0 GB"
    with pytest.raises(SettingsError, match=r"need 4 GPUs .*; the cluster has 3 GPUs"):
        plan_topology(settings, Sizes(ModelSize(1000)), nodes(3))


@pytest.mark.parametrize(("given", "counted"), [(1 / 3, 0.3333), (0.3, 0.3), (0.29, 0.29), (0.0001, 0.0001)])
def test_share_of_a_gpu_is_what_ray_will_say_that_a_server_has(given: float, counted: float) -> None:
    # Else a warm server would never be found to stand in its place.
    assert ServerPlacement(gpus=given, resources={"h100": given}).gpus == counted


def test_names_of_an_operators_own_are_told_from_what_ray_counts() -> None:
    counted = {"CPU": 2.0, "GPU": 8.0, "memory": 1e9, "object_store_memory": 1e9, "node:10.0.0.1": 1.0}
    counted |= {"node:__internal_head__": 1.0, "accelerator_type:H100": 1.0}
    assert without_names_of_ray({**counted, "h100": 8.0, "rack:a": 1.0}) == {"h100": 8.0, "rack:a": 1.0}
