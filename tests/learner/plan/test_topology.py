"""Which processes a run has, with which GPUs, and what is refused from the cluster's machines alone."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from learner.disk.model_folder import ModelSize
from learner.plan.memory import Sizes
from learner.plan.processes import Node
from learner.plan.shown import node_rows, tight_words
from learner.plan.topology import choose_backend, plan_topology
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


@pytest.mark.parametrize(("num_gpus", "backend"), [(8, "auto"), (8, "gloo"), (0, "auto")])
def test_each_rank_has_a_gpu_and_each_server_its_tensor_parallel_size(num_gpus: int, backend: str) -> None:
    nodes = [Node("10.0.0.1", num_gpus), Node("10.0.0.2", num_gpus)]
    ranks, servers = (1, 2) if num_gpus else (0, 0)
    of = settings(weights={"backend": backend})
    assert shape(of, nodes) == [(1, 0, "here"), (2, ranks, "packed"), (2, servers, "spread")]


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


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "problem"),
    [
        ("nccl", 0, "weights.backend = nccl needs GPUs, and this cluster has none"),
        ("ipc", 8, "needs ranks and servers on the same GPUs, and they have GPUs of their own"),
    ],
)
def test_backend_that_the_gpus_do_not_allow_is_refused(wanted: str, num_gpus: int, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        choose_backend(wanted, num_gpus)


def shared(num: int = 1, **more: object) -> Settings:
    return settings(num, num, 1, placement={"devices": "shared"}, **more)


def test_one_rank_and_one_server_share_the_one_gpu_of_a_cluster_without_a_setting() -> None:
    plan = plan_topology(settings(1, 1, 1), SIZES, [Node("10.0.0.1", 1)])
    assert (plan.shares_devices, plan.backend) == (True, "ipc")
    assert plan.ranks.places == plan.servers.places == (Node("10.0.0.1", 1),)


@pytest.mark.parametrize(("devices", "num_gpus"), [("auto", 2), ("auto", 0), ("split", 2)])
def test_ranks_and_servers_have_devices_of_their_own_where_there_are_enough(devices: str, num_gpus: int) -> None:
    asked = settings(1, 1, 1, placement={"devices": devices})
    assert not plan_topology(asked, SIZES, [Node("10.0.0.1", num_gpus)]).shares_devices


def test_split_devices_need_a_gpu_each() -> None:
    asked = settings(1, 1, 1, placement={"devices": "split"})
    assert "rollout.tensor_parallel_size = 1); the cluster has 1 GPUs" in refusal(asked, [Node("10.0.0.1", 1)])


def test_each_rank_of_several_has_the_server_of_its_number_beside_it() -> None:
    nodes = [Node("10.0.0.1", 1), Node("10.0.0.2", 3)]
    plan = plan_topology(shared(4), SIZES, nodes)
    assert plan.backend == "ipc"
    assert plan.ranks.places == plan.servers.places
    assert [plan.ranks.places.count(node) for node in nodes] == [1, 3]


def test_four_servers_of_four_gpus_share_sixteen_with_a_rank_on_each() -> None:
    nodes = [Node(name, 8, gpu_bytes=80_000_000_000, host_bytes=2_000_000_000_000) for name in ("one", "other")]
    size = Sizes(ModelSize(32_000_000_000, num_layers=64, hidden_size=5120))
    learner = {"num_ranks": 16, "zero_stage": 3, "offload": "optimizer"}
    rollout = {"num_servers": 4, "tensor_parallel_size": 4}
    asked = settings(learner=learner, rollout=rollout, policy={"dtype": "bfloat16"}, placement={"devices": "shared"})
    plan = plan_topology(asked, size, nodes)
    assert (plan.backend, plan.ranks.count, plan.servers.count, plan.servers.num_gpus) == ("ipc", 16, 4, 4)
    assert [row[:4] for row in node_rows(plan)] == [
        ("one", "8 of 8", "0-7", "0, 1"),
        ("other", "8 of 8", "8-15", "2, 3"),
    ]
    on_card = plan.ranks.state_bytes + plan.servers.state_bytes + plan.servers.push_bytes
    assert on_card < plan.ranks.memory_bytes + plan.servers.memory_bytes < 80_000_000_000


def test_shared_servers_of_several_gpus_need_a_rank_on_each_and_whole_servers_on_a_node() -> None:
    def refused(num_ranks: int, nodes: int | None = None) -> str:
        placement = {"devices": "shared", "ranks": {"nodes": nodes}}
        with pytest.raises(ValidationError) as caught:
            settings(num_ranks, 4, 4, placement=placement)
        return str(caught.value)

    assert "learner.num_ranks = 4 is not rollout.num_servers = 4 times rollout.tensor_parallel_size = 4" in refused(4)
    assert "placement.ranks puts 2 ranks on a node, which is not a multiple of" in refused(16, nodes=8)


def test_shared_devices_on_cpus_take_turns_and_no_gpu() -> None:
    plan = plan_topology(shared(2), SIZES, [Node("10.0.0.1", 0)])
    assert (plan.shares_devices, plan.ranks.num_gpus, plan.servers.num_gpus) == (True, 0, 0)


def test_a_warm_start_alone_shares_with_nobody() -> None:
    alone = shared(run={"max_steps": 0}, policy={"warm_start": {"data": "rows.jsonl"}})
    assert not plan_topology(alone, SIZES, [Node("10.0.0.1", 1)]).shares_devices


def test_what_is_not_on_a_shared_gpu_in_its_turn_is_counted_on_the_host() -> None:
    plan = plan_topology(shared(), SIZES, [Node("10.0.0.1", 1)])
    assert plan.servers.host_bytes == 2 * 1000
    assert plan.ranks.host_bytes == plan.ranks.state_bytes == (2 + 4 + 12) * 1000


def test_shared_memory_that_is_not_there_is_refused() -> None:
    small_card, small_host = Node("10.0.0.1", 1, gpu_bytes=15_000), Node("10.0.0.1", 1, host_bytes=15_000)
    roles = "settings: learner ranks and rollout servers that share devices need"
    assert refusal(shared(), [small_card]).startswith(f"{roles} 1.1 GB on each GPU in a push; 10.0.0.1 has")
    assert refusal(shared(), [small_host]).startswith(f"{roles} 0 GB of host memory between turns; 10.0.0.1 has")


def test_a_shared_plan_says_who_has_the_gpu_when() -> None:
    plan = plan_topology(shared(), SIZES, [Node("10.0.0.1", 1, gpu_bytes=80_000_000_000)])
    ((_, gpus, ranks, servers, card),) = node_rows(plan)
    assert (gpus, ranks, servers) == ("1 of 1", "0", "0")
    assert card == "rank 0.5 or server 0.0 + KV cache of 80 GB; host 0 GB"


def test_a_plan_says_which_rank_may_run_out_of_memory_in_a_full_micro_batch() -> None:
    size = ModelSize(7_000_000_000, num_layers=28, hidden_size=3584, kept_in_layer=60_000)
    of_long = settings(4, 1, 1, policy={"dtype": "bfloat16"}, rollout={"max_context_tokens": 16_384})

    def words(gradient_checkpointing: bool, gpu_bytes: int | None) -> str:
        learner = of_long.learner.model_copy(update={"gradient_checkpointing": gradient_checkpointing})
        asked = of_long.model_copy(update={"learner": learner})
        return tight_words(plan_topology(asked, Sizes(size), [Node("10.0.0.1", 8, gpu_bytes=gpu_bytes)]))

    said = words(False, 80_000_000_000)
    assert said.startswith("A rank may run out of memory: with a full micro-batch it takes up to 1")
    assert "a GPU of 10.0.0.1 has 80 GB. Lower learner.micro_batch_tokens" in said
    assert words(True, 80_000_000_000) == words(False, None) == ""


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

    assert "over ipc a push is loaded as it arrives" in refusal(by_ipc, [Node("10.0.0.1", 0)])
    assert "weights.second_copy = true needs weights.backend = gloo" in refusal(asked, _TWO_EIGHTS)


@pytest.mark.parametrize(("num_gpus", "backend"), [(8, "gloo"), (0, "gloo"), (0, "auto")])
def test_a_second_copy_is_refused_and_not_counted_where_servers_sleep_during_a_push(
    num_gpus: int, backend: str
) -> None:
    nodes = [Node("10.0.0.1", num_gpus)]

    def of(second_copy: bool | None) -> Settings:
        weights = {"backend": backend, "second_copy": second_copy}
        return settings(tensor_parallel_size=1, placement={"devices": "shared"}, weights=weights)

    assert "servers that share devices sleep then" in refusal(of(True), nodes)
    assert plan_topology(of(None), SIZES, nodes).servers == plan_topology(of(False), SIZES, nodes).servers


@pytest.mark.parametrize("num_gpus", [0, 6, 8])
def test_a_run_that_fits_the_gpus_or_has_none_is_let_through(num_gpus: int) -> None:
    plan_topology(settings(), SIZES, [Node("127.0.0.1", num_gpus)])


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
    offloaded = settings(learner={"zero_stage": 2, "offload": "optimizer", "num_ranks": 2}, weights={"bucket_mb": 16})
    on_gpus, on_cpus = (plan_topology(offloaded, SIZES, [Node("10.0.0.1", gpus)]).ranks for gpus in (8, 0))
    assert on_gpus.host_bytes == (12 + 8 + 2) * 1000 // 2
    assert (on_cpus.memory_bytes, on_cpus.host_bytes) == (on_gpus.memory_bytes + on_gpus.host_bytes, 0)


def test_a_cluster_whose_nodes_are_all_away_for_a_moment_is_waited_for_as_one_without_room() -> None:
    # Ray describes a node that came back as two for half a minute: where both seem to listen, none is counted.
    assert refusal(settings(), []) == (
        "settings: the cluster has no node that takes processes at the moment: Ray lists a restarted node twice for "
        "half a minute. Give the command again, or have nodes join (sluice start --join)."
    )


@pytest.mark.parametrize(("num_gpus", "of_ranks", "of_servers"), [(8, 264, 96), (0, 268, 120)])
def test_what_ranks_and_servers_of_a_node_have_in_its_memory_is_added_up(
    num_gpus: int, of_ranks: int, of_servers: int
) -> None:
    asked = settings(4, 1, 4, weights={"backend": "gloo"}, learner={"num_ranks": 4, "zero_stage": 3, "offload": "all"})

    def planned(host_bytes: int) -> None:
        plan_topology(asked, Sizes(ModelSize(12 * 10**9)), [Node("10.0.0.1", num_gpus, host_bytes=host_bytes)])

    planned((of_ranks + of_servers) * 10**9)
    with pytest.raises(SettingsError) as caught:
        planned((of_ranks + of_servers) * 10**9 - 1)
    assert f"4 ranks with {of_ranks} GB and 1 servers with {of_servers} GB; 10.0.0.1 has" in str(caught.value)
