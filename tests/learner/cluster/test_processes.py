"""Ranks of other nodes and the run folder: refused by node before anything is made of them."""

from pathlib import Path
from typing import Any

import pytest

from learner.cluster import processes
from learner.disk.model_folder import ModelSize
from learner.disk.shared_folder import Mark, sees
from learner.plan.memory import Sizes
from learner.plan.processes import Node
from learner.plan.topology import plan_topology
from protocol.errors import OperatorError
from protocol.settings.settings import Settings


class Rank:
    """A learner rank on a node whose disk is at another folder."""

    def __init__(self, number: int, disk: Path) -> None:
        self.number = number
        self.name = f"learner rank {number}, as it is told of"
        self._node_ip = f"10.0.0.{number + 1}"
        self._disk = disk

    def ask(self, method: str, mark: Mark) -> tuple[str, bool]:
        assert method == "sees"
        return self._node_ip, sees(Mark(self._disk / mark.path.name, mark.text))


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(answer: object, _who: str) -> object:
        return answer

    monkeypatch.setattr(processes, "call", call)


def check(folder: Path, *disks: Path) -> None:
    ranks: list[Any] = [Rank(number, disk) for number, disk in enumerate(disks)]
    processes._check_shared(ranks, folder)


def test_ranks_that_share_the_run_folder_will_do(tmp_path: Path) -> None:
    check(tmp_path, tmp_path, tmp_path)


def test_rank_that_does_not_share_it_is_named_with_its_node(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(OperatorError) as caught:
        check(tmp_path, tmp_path, tmp_path / "other")
    assert f"The run folder {tmp_path} is not shared with learner rank 1 on node 10.0.0.2: " in str(caught.value)
    assert list(tmp_path.glob(".shared_*")) == []


def test_ranks_are_named_with_their_nodes_where_there_are_several() -> None:
    settings = Settings.model_validate({"learner": {"num_ranks": 2}})
    one, other = Node("10.0.0.1", 0), Node("10.0.0.2", 0)
    plans = [plan_topology(settings, Sizes(ModelSize(1000)), nodes) for nodes in ([one], [one, other])]
    assert [processes.rank_names(plan) for plan in plans] == [
        ["learner rank 0", "learner rank 1"],
        ["learner rank 0 on node 10.0.0.1", "learner rank 1 on node 10.0.0.1"],
    ]


def test_a_rank_shares_its_cores_with_the_ranks_of_its_own_node() -> None:
    settings = Settings.model_validate({"learner": {"num_ranks": 16}, "rollout": {"num_servers": 8}})
    plan = plan_topology(settings, Sizes(ModelSize(1000)), [Node(f"10.0.0.{number}", 8) for number in (1, 2, 3)])
    places = processes.rank_places(plan, "10.0.0.1", 1234)
    assert [(place.rank, place.ranks_here) for place in places] == [(number, 8) for number in range(16)]
