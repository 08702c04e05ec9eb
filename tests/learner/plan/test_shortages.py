"""Memory that processes of one node or one GPU have together, and one GPU that is too few for a run."""

from dataclasses import replace

import pytest

from learner.disk.model_folder import ModelSize
from learner.plan.memory import Sizes
from learner.plan.processes import Node, Processes
from learner.plan.shortages import Shortage, gpu_memory_shortages, shared_device_shortages
from learner.plan.shown import describe_crowded
from learner.plan.topology import plan_topology
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

_GB = 10**9


def processes(role: str, state_bytes: int, places: list[Node], num_gpus: float = 1.0) -> Processes:
    return Processes(
        role, len(places) or 1, num_gpus, "packed", state_bytes, "", state_bytes=state_bytes, places=tuple(places)
    )


def test_a_shared_gpu_holds_what_a_push_adds_to_both() -> None:
    card = Node("10.0.0.1", 1, gpu_bytes=24 * _GB)
    rank, server = processes("learner rank", 12 * _GB, [card]), processes("rollout server", 10 * _GB, [card])
    assert shared_device_shortages(rank, replace(server, push_bytes=2 * _GB)) == []
    (shortage,) = shared_device_shortages(replace(rank, push_bytes=1 * _GB), replace(server, push_bytes=2 * _GB))
    assert (shortage.needs, shortage.has) == ("25.0 GB on each GPU in a push", "24 GB a GPU")


def test_a_server_with_half_a_gpu_has_half_of_its_memory() -> None:
    card = Node("10.0.0.1", 1, gpu_bytes=24 * _GB)
    assert gpu_memory_shortages(processes("rollout server", 12 * _GB, [card], 0.5), [card]) == []
    (shortage,) = gpu_memory_shortages(processes("rollout server", 16 * _GB, [card], 0.5), [card])
    assert (shortage.needs, shortage.node) == ("16.0 GB of weights on each GPU", "10.0.0.1")
    assert shortage.has == "24 GB a GPU, of which each gets 0.5"


def test_host_memory_of_all_processes_that_take_turns_on_a_node_is_counted() -> None:
    host = Node("10.0.0.1", 4, host_bytes=100 * _GB)

    def shortages(num: int) -> list[Shortage]:
        return shared_device_shortages(
            processes("learner rank", 30 * _GB, [host] * num), processes("rollout server", 10 * _GB, [host] * num)
        )

    assert shortages(2) == []
    (shortage,) = shortages(3)
    assert (shortage.needs, shortage.has) == ("120 GB of host memory between turns", "100 GB")


def test_everything_that_does_not_fit_is_shown_at_once() -> None:
    asked = Settings.model_validate(
        {
            "learner": {"num_ranks": 4},
            "rollout": {"num_servers": 4},
            "placement": {"ranks": {"nodes": 4}, "servers": {"resources": {"b200": 1}}},
        }
    )
    with pytest.raises(SettingsError) as refused:
        plan_topology(asked, Sizes(ModelSize(7 * _GB)), [Node("10.0.0.1", 1, gpu_bytes=24 * _GB)])
    head, *rows = str(refused.value).splitlines()
    assert head == "settings: the cluster cannot hold this run, for 4 reasons:"
    assert [row.partition(";")[0] for row in rows] == [
        "- learner ranks need 4 nodes (placement.ranks.nodes)",
        "- rollout servers need 1 b200 each (placement.servers.resources)",
        "- learner ranks and rollout servers need 8 GPUs (learner.num_ranks = 4, rollout.num_servers = 4, "
        "rollout.tensor_parallel_size = 1)",
        "- learner ranks need 42.0 GB of weights and optimizer on each GPU",
    ]


def test_one_gpu_is_not_shared_by_more_servers_than_ranks() -> None:
    asked = Settings.model_validate({"learner": {"num_ranks": 1}, "rollout": {"num_servers": 2}})
    with pytest.raises(SettingsError, match=r"need 3 GPUs .*; the cluster has 1 GPUs"):
        plan_topology(asked, Sizes(ModelSize(1000)), [Node("10.0.0.1", 1)])


def test_a_reference_that_makes_ranks_too_large_is_named_with_what_helps() -> None:
    def planned(zero_stage: int, reference: dict[str, bool]) -> None:
        given = {
            "policy": {"dtype": "bfloat16"},
            "learner": {"num_ranks": 4, "zero_stage": zero_stage},
            "kl": {"coefficient": 0.1},
            "reference": reference,
        }
        card = Node("10.0.0.1", 8, gpu_bytes=50 * _GB)
        plan_topology(Settings.model_validate(given), Sizes(ModelSize(7 * _GB)), [card])

    planned(3, {})
    for is_offloaded in (False, True):  # during use it is on the device in any case
        with pytest.raises(SettingsError) as refused:
            planned(2, {"offload": is_offloaded})
        assert str(refused.value) == (
            "settings: learner ranks need 56.0 GB of weights and optimizer on each GPU; 10.0.0.1 has 50 GB a GPU. "
            "Raise learner.num_ranks or learner.zero_stage, or set learner.offload. The reference is whole on each "
            "rank: learner.zero_stage = 3 shards it."
        )


def test_model_that_the_node_of_rank_0_cannot_hold_while_it_loads_is_refused() -> None:
    asked = Settings.model_validate(
        {"learner": {"num_ranks": 8, "zero_stage": 3}, "placement": {"ranks": {"nodes": 1}}}
    )
    nodes = [Node(f"10.0.0.{number}", 8, gpu_bytes=80 * _GB, host_bytes=100 * _GB) for number in (1, 2)]
    refusal = "learner ranks need 141 GB of host memory on the node of rank 0, which reads the whole model; "
    with pytest.raises(SettingsError, match=refusal + r"10\.0\.0\.1 has 100 GB\."):
        plan_topology(asked, Sizes(ModelSize(70_500_000_000)), nodes)


@pytest.mark.parametrize(("num_ranks", "is_said"), [(1, False), (8, True)])
def test_more_processes_than_cores_are_said(num_ranks: int, is_said: bool) -> None:
    asked = Settings.model_validate({"learner": {"num_ranks": num_ranks, "groups_per_step": 8}})
    planned = plan_topology(asked, Sizes(ModelSize(1000)), [Node("10.0.0.1", 0, num_cpus=2)])
    says = "Node 10.0.0.1 has 2 CPU cores for 8 learner ranks and 1 rollout server: they slow each other down. "
    assert describe_crowded(planned).startswith(says) == is_said
    assert bool(describe_crowded(planned)) == is_said
