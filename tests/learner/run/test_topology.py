"""Which processes a run has, with which GPUs, and what is refused from the cluster's machines alone."""

from dataclasses import replace

import pytest

from learner.disk.model_size import ModelSize
from learner.run.placement.node import Node
from learner.run.rank_memory import Sizes
from learner.run.topology import choose_backend, plan_topology
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

SIZES = Sizes(ModelSize(1000))
_TWO_EIGHTS = [Node("10.0.0.1", 8), Node("10.0.0.2", 8)]


def settings(num_ranks: int = 2, num_servers: int = 2, tensor_parallel_size: int = 2, **more: object) -> Settings:
    sections: dict[str, object] = {
        "learner": {"num_ranks": num_ranks},
        "rollout": {"num_servers": num_servers, "tensor_parallel_size": tensor_parallel_size},
    }
    return Settings.model_validate(sections | more)


def shape(of: Settings, nodes: list[Node] | None) -> list[tuple[int, int, str]]:
    """Return (count, GPUs each, where) of coordinator, ranks and servers."""
    plan = plan_topology(of, SIZES, nodes)
    return [(part.count, part.num_gpus, part.where) for part in (plan.coordinator, plan.ranks, plan.servers)]


def refusal(of: Settings, nodes: list[Node] | None) -> str:
    with pytest.raises(SettingsError) as caught:
        plan_topology(of, SIZES, nodes)
    return str(caught.value)


def test_each_rank_has_a_gpu_and_each_server_its_tensor_parallel_size() -> None:
    assert shape(settings(), _TWO_EIGHTS) == [(1, 0, "here"), (2, 1, "packed"), (2, 2, "spread")]


def test_without_gpus_everything_runs_on_cpus() -> None:
    assert shape(settings(), [Node("127.0.0.1", 0)]) == [(1, 0, "here"), (2, 0, "packed"), (2, 0, "spread")]


def test_gloo_on_a_cluster_with_gpus_leaves_the_servers_theirs() -> None:
    assert shape(settings(weights={"backend": "gloo"}), _TWO_EIGHTS)[2] == (2, 2, "spread")


@pytest.mark.parametrize(("backend", "num_gpus"), [("auto", 2), ("nccl", 2), ("gloo", 0)])
def test_without_a_running_cluster_gpus_follow_the_way_of_the_weights(backend: str, num_gpus: int) -> None:
    assert shape(settings(weights={"backend": backend}), None)[2] == (2, num_gpus, "spread")


def test_warm_start_alone_has_no_server() -> None:
    alone = settings(run={"max_steps": 0}, policy={"warm_start": {"data": "rows.jsonl"}})
    assert shape(alone, _TWO_EIGHTS)[2][0] == 0


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "chosen"),
    [("auto", 0, "gloo"), ("ipc", 0, "ipc"), ("auto", 8, "nccl"), ("gloo", 8, "gloo"), ("nccl", 1, "nccl")],
)
def test_backend_follows_the_gpus_unless_it_is_named(wanted: str, num_gpus: int, chosen: str) -> None:
    assert choose_backend(wanted, num_gpus) == chosen


def test_nccl_is_refused_without_a_gpu() -> None:
    with pytest.raises(SettingsError, match=r"weights\.backend = nccl needs GPUs, and this cluster has none"):
        choose_backend("nccl", 0)


def test_ipc_is_refused_where_learner_and_engine_have_gpus_of_their_own() -> None:
    with pytest.raises(SettingsError, match=r"weights\.backend = ipc needs learner and engine on one GPU"):
        choose_backend("ipc", 8)


def test_ipc_is_taken_on_one_machine_and_refused_where_a_server_is_on_another() -> None:
    asked = settings(weights={"backend": "ipc"})
    assert plan_topology(asked, SIZES, [Node("10.0.0.1", 0)]).backend == "ipc"

    assert refusal(asked, [Node("10.0.0.1", 0), Node("10.0.0.2", 0)]) == (
        "settings: weights.backend = ipc shares memory of one machine, and the first rank is on 10.0.0.1, servers on "
        "10.0.0.2. Set weights.backend to auto, or placement.colocate to [[ranks, servers]]."
    )


def test_a_second_copy_of_the_weights_is_refused_over_nccl() -> None:
    asked = settings(weights={"second_copy": True})
    shape(asked, [Node("10.0.0.1", 0)])
    by_ipc = settings(weights={"second_copy": True, "backend": "ipc"})

    assert "over ipc a push is loaded as it comes" in refusal(by_ipc, [Node("10.0.0.1", 0)])
    assert "weights.second_copy = true needs weights.backend = gloo" in refusal(asked, _TWO_EIGHTS)


@pytest.mark.parametrize("num_gpus", [0, 6, 8])
def test_a_run_that_fits_the_gpus_or_has_none_is_let_through(num_gpus: int) -> None:
    plan_topology(settings(), SIZES, [Node("127.0.0.1", num_gpus)])


def test_a_run_that_wants_more_gpus_than_there_are_is_refused() -> None:
    assert refusal(settings(), [Node("127.0.0.1", 5)]) == (
        "settings: learner.num_ranks = 2 and rollout.num_servers = 2 with rollout.tensor_parallel_size = 2 "
        "need 6 GPUs; the cluster has 5. Lower one of them."
    )


def test_a_server_whose_gpus_no_node_has_is_refused() -> None:
    nodes = [Node("10.0.0.1", 3), Node("10.0.0.2", 3)]
    assert refusal(settings(num_ranks=1, num_servers=1, tensor_parallel_size=4), nodes) == (
        "settings: rollout.num_servers = 1 with rollout.tensor_parallel_size = 4 fit 0 times on nodes with 3, 3 GPUs: "
        "a server's GPUs are of one node. Lower one of them."
    )


def test_memory_of_a_server_is_its_share_of_the_weights_and_of_the_coordinator_the_window() -> None:
    small = settings(learner={"num_ranks": 1, "groups_per_step": 2, "max_staleness": 1})
    small = small.model_copy(update={"rollout": small.rollout.model_copy(update={"group_size": 3})})
    plan = plan_topology(small, SIZES, _TWO_EIGHTS)
    assert plan.servers.memory_bytes == 1000 * 2 // 2
    assert plan.coordinator.memory_bytes == 2 * 2 * 3 * 4096 * 9
    assert plan == replace(plan, backend="nccl")


@pytest.mark.parametrize(("second_copy", "copy"), [(None, 4000), (True, 4000), (False, 0)])
def test_second_copy_of_a_push_is_whole_in_the_host_memory_of_each_worker(second_copy: bool | None, copy: int) -> None:
    of = settings(weights={"backend": "gloo", "second_copy": second_copy})
    on_gpus, on_cpus = (plan_topology(of, SIZES, [Node("10.0.0.1", gpus)]).servers for gpus in (8, 0))
    assert (on_gpus.memory_bytes, on_gpus.host_bytes) == (1000, copy)
    assert (on_cpus.memory_bytes, on_cpus.host_bytes) == (2000 + copy, 0)
    assert on_cpus.besides == ("with a push's second copy + KV cache" if copy else "+ KV cache")


def test_over_nccl_a_server_has_no_second_copy() -> None:
    assert plan_topology(settings(), SIZES, _TWO_EIGHTS).servers.copy_bytes == 0


def test_what_is_offloaded_is_told_apart_where_ranks_have_gpus_and_added_where_they_have_none() -> None:
    offloaded = settings(learner={"zero_stage": 2, "offload": "optimizer", "num_ranks": 2})
    on_gpus, on_cpus = (plan_topology(offloaded, SIZES, [Node("10.0.0.1", gpus)]).ranks for gpus in (8, 0))
    assert on_gpus.host_bytes == (12 + 8 + 2) * 1000 // 2
    assert (on_cpus.memory_bytes, on_cpus.host_bytes) == (on_gpus.memory_bytes + on_gpus.host_bytes, 0)
