"""Memory that processes of one node or one GPU have together, and one GPU that is too few for a run."""

import pytest

from learner.disk.model_size import ModelSize
from learner.run.placement.node import Node
from learner.run.placement.refusals import check_memory, check_turns
from learner.run.rank_memory import Sizes
from learner.run.topology import plan_topology
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

_GB = 10**9


def test_a_server_with_half_a_gpu_has_half_of_its_memory() -> None:
    card = Node("10.0.0.1", 1, gpu_bytes=24 * _GB)
    check_memory("rollout server", 12 * _GB, 0.5, [card])
    with pytest.raises(SettingsError, match=r"each rollout server has 16.0 GB of weights .* 0.5 of a GPU of 10.0.0.1"):
        check_memory("rollout server", 16 * _GB, 0.5, [card])


def test_host_memory_of_all_that_take_turns_on_a_node_is_counted() -> None:
    host = Node("10.0.0.1", 4, host_bytes=100 * _GB)
    check_turns(30 * _GB, 10 * _GB, 0, [host] * 2, has_gpus=True)
    with pytest.raises(SettingsError, match=r"shared keeps 120 GB in the memory of 10.0.0.1 .* it has 100 GB"):
        check_turns(30 * _GB, 10 * _GB, 0, [host] * 3, has_gpus=True)


def test_one_gpu_is_not_shared_by_more_servers_than_ranks() -> None:
    asked = Settings.model_validate({"learner": {"num_ranks": 1}, "rollout": {"num_servers": 2}})
    with pytest.raises(SettingsError, match="need 3 GPUs; the cluster has 1"):
        plan_topology(asked, Sizes(ModelSize(1000)), [Node("10.0.0.1", 1)])


def test_a_reference_that_makes_ranks_too_large_is_named_with_what_helps() -> None:
    def planned(reference: dict[str, bool]) -> None:
        given = {
            "policy": {"dtype": "bfloat16"},
            "learner": {"num_ranks": 4, "zero_stage": 3},
            "kl": {"coefficient": 0.1},
            "reference": reference,
        }
        card = Node("10.0.0.1", 8, gpu_bytes=40 * _GB)
        plan_topology(Settings.model_validate(given), Sizes(ModelSize(7 * _GB)), [card])

    planned({"offload": True})
    with pytest.raises(SettingsError) as refused:
        planned({})
    assert str(refused.value) == (
        "settings: each learner rank has 45.5 GB of weights and optimizer on each GPU, and a GPU of 10.0.0.1 has 40 "
        "GB. Raise learner.num_ranks or learner.zero_stage, or set learner.offload. The reference is whole on each: "
        "set reference.offload."
    )
