"""More or fewer rollout servers while a run goes on, with a fleet that answers when the test lets it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from learner.run.placement.node import Node
from learner.run.server_count import ServerCount
from learner.run.server_watch import ServerWatch
from learner.run.topology import Processes
from protocol.errors import NeighbourError, OperatorError
from protocol.node.server_wish import read_answer, wish_servers
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings

NODES = [Node("10.0.0.1", 8, "head", is_head=True), Node("10.0.0.2", 8, "far")]


class Fleet:
    """`FleetCalls`: what was asked, and the answers to it, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.where = ["head"]
        self.is_slow = False
        self.failure: Exception | None = None

    def add(self, planned: Processes, nodes: Sequence[str]) -> Any:
        self.asked.append(("add", *nodes))
        return [{"name": f"sluice-rollout-{number}"} for number in range(1, 1 + len(nodes))]

    def remove(self, name: str) -> Any:
        self.asked.append(("remove", name))

    def nodes_of(self, names: Sequence[str]) -> Any:
        return self.where

    def is_done(self, reference: Any) -> bool:
        return not self.is_slow

    def result(self, reference: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        return reference


class Quiet:
    """`ServerCalls` to servers that never answer."""

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        return name

    def is_done(self, reference: Any) -> bool:
        return False

    def result(self, reference: Any, name: str) -> Any:
        return None


class Run:
    """A run of some servers in a folder, and what it was told."""

    def __init__(self, folder: Path, names: Sequence[str] = ("sluice-rollout-0",)) -> None:
        self.folder = folder
        self.fleet = Fleet()
        self.pushed_to: list[tuple[str, ...]] = []
        self.released: list[str] = []
        spec = run_spec(Settings(), "my-run", 1, "tcp://127.0.0.1:1")
        self.watch = ServerWatch(names, spec, lambda name, why: None, Quiet())
        self.count = ServerCount(
            folder,
            names,
            self.watch,
            self.fleet,
            plan=self.plan,
            push_to=self.pushed_to.append,
            release=lambda name, why: self.released.append(name),
        )

    def plan(self, number: int) -> Processes:
        if number > 4:
            raise OperatorError("The nodes hold 4 servers.")
        places = tuple((NODES * 2)[:number])
        return Processes(
            role="servers", count=number, num_gpus=1, where="spread", memory_bytes=0, besides="", places=places
        )

    def polled(self, times: int = 3) -> list[str]:
        return [message for _ in range(times) for message in self.count.poll()]

    @property
    def answer(self) -> tuple[str, bool, bool]:
        answer = read_answer(self.folder)
        assert answer is not None
        return answer.text, answer.is_last, answer.is_refused


def test_new_servers_start_where_the_plan_has_none_yet_and_are_watched_and_pushed_to(tmp_path: Path) -> None:
    run = Run(tmp_path)
    wish_servers(tmp_path, 2)
    said = "sluice-rollout-1, sluice-rollout-2 started, and serve from the next push on: 3 in all."
    assert run.polled() == [said]
    assert run.fleet.asked == [("add", "head", "far")]
    assert run.pushed_to == [("sluice-rollout-0", "sluice-rollout-1", "sluice-rollout-2")]
    assert run.watch.num_hopeful == 3
    assert run.watch.num_serving == 1
    assert run.answer == (said, True, False)
    assert run.polled() == []  # a wish is taken up once


def test_servers_that_are_taken_away_are_pushed_to_no_more_and_their_samples_released(tmp_path: Path) -> None:
    run = Run(tmp_path, ["sluice-rollout-0", "sluice-rollout-1", "sluice-rollout-2"])
    wish_servers(tmp_path, -2)
    run.fleet.is_slow = True
    assert run.polled() == []
    assert run.pushed_to == [("sluice-rollout-0",)]
    assert run.fleet.asked == [("remove", "sluice-rollout-1"), ("remove", "sluice-rollout-2")]
    assert run.watch.num_hopeful == 1
    assert run.released == []  # they may still be at it
    assert run.answer[1:] == (False, False)
    run.fleet.is_slow = False
    assert run.polled() == ["Rollout servers were taken away: 1 are left."]
    assert run.released == ["sluice-rollout-1", "sluice-rollout-2"]
    assert run.count.names == ["sluice-rollout-0"]


def test_server_that_died_while_it_was_taken_away_is_gone_all_the_same(tmp_path: Path) -> None:
    run = Run(tmp_path, ["sluice-rollout-0", "sluice-rollout-1"])
    run.fleet.failure = NeighbourError("sluice-rollout-1", "died")
    wish_servers(tmp_path, -1)
    assert run.polled() == ["Rollout servers were taken away: 1 are left."]
    assert run.released == ["sluice-rollout-1"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (-1, "The run has 1 rollout servers; -1 would leave 0."),
        (0, "The run has 1 rollout servers; +0 would leave 1."),
        (9, "The nodes hold 4 servers."),
    ],
)
def test_number_that_cannot_be_is_refused_and_nothing_changes(tmp_path: Path, change: int, why: str) -> None:
    run = Run(tmp_path)
    wish_servers(tmp_path, change)
    assert run.polled() == [f"The number of rollout servers stays 1. {why}"]
    assert run.answer == (why, True, True)
    assert run.fleet.asked == run.pushed_to == []


def test_server_that_was_moved_to_another_node_counts_where_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.fleet.where = ["far"]
    wish_servers(tmp_path, 1)
    run.polled()
    assert run.fleet.asked == [("add", "head")]


def test_server_that_does_not_start_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.fleet.failure = NeighbourError("sluice-rollout-1", "did not start: no memory")
    wish_servers(tmp_path, 1)
    assert run.polled() == ["The number of rollout servers stays 1. sluice-rollout-1: did not start: no memory"]
    assert run.count.names == ["sluice-rollout-0"]
    assert run.pushed_to == []


def test_wish_of_an_earlier_start_is_not_taken_up_again(tmp_path: Path) -> None:
    wish_servers(tmp_path, 1)
    assert Run(tmp_path).polled() == []
