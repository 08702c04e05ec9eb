"""More or fewer rollout servers while a run goes on, with a fleet that answers when the test lets it."""

from pathlib import Path

import pytest

from protocol.errors import NeighbourError
from protocol.node.scale_request import write_request
from tests.learner.run.counted_run import Run


def test_new_servers_start_where_the_plan_has_none_yet_and_are_watched_and_pushed_to(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_request(tmp_path, 2)
    said = "sluice-rollout-1, sluice-rollout-2 started, and serve from the next push on: 3 in all."
    assert run.polled() == [said]
    assert run.fleet.asked == [("add", "head", "far")]
    assert run.pushed_to == [("sluice-rollout-0", "sluice-rollout-1", "sluice-rollout-2")]
    assert run.watch.num_hopeful == 3
    assert run.watch.num_serving == 1
    assert run.answer == (said, True, False)
    assert run.polled() == []  # a wish is taken up once


def test_server_that_comes_late_is_pushed_to_once_it_serves(tmp_path: Path) -> None:
    run = Run(tmp_path, ["sluice-rollout-0", "sluice-rollout-1", "sluice-rollout-2"], late=["sluice-rollout-1"])
    assert (run.polled(), run.pushed_to) == ([], [])
    assert (run.watch.num_hopeful, run.watch.num_serving) == (3, 2)
    run.servers.do_answer = True
    said = [message for _ in range(4) for message in run.watch.poll()]
    assert "sluice-rollout-1 serves, from the next push on" in said
    assert run.polled() == []
    assert run.pushed_to == [("sluice-rollout-0", "sluice-rollout-1", "sluice-rollout-2")]


def test_server_that_is_still_late_is_not_pushed_to_when_others_are_taken_away(tmp_path: Path) -> None:
    names = [f"sluice-rollout-{number}" for number in range(4)]
    run = Run(tmp_path, names, late=names[1:3])
    for left in (names[:2] + names[3:], [names[0], names[3]]):
        write_request(tmp_path, -1)
        run.polled()
        assert run.count.names == left
    assert run.pushed_to == [("sluice-rollout-0", "sluice-rollout-3")] * 2


def test_server_that_does_not_serve_yet_is_taken_away_before_the_one_that_does(tmp_path: Path) -> None:
    run = Run(tmp_path, ["sluice-rollout-0", "sluice-rollout-1"], late=["sluice-rollout-0"])
    write_request(tmp_path, -1)
    run.polled()
    assert run.fleet.asked == [("remove", "sluice-rollout-0")]
    assert run.pushed_to == [("sluice-rollout-1",)]
    assert run.watch.num_serving == 1


def test_servers_that_are_taken_away_are_pushed_to_no_more_and_their_samples_released(tmp_path: Path) -> None:
    run = Run(tmp_path, ["sluice-rollout-0", "sluice-rollout-1", "sluice-rollout-2"])
    write_request(tmp_path, -2)
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
    write_request(tmp_path, -1)
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
    write_request(tmp_path, change)
    assert run.polled() == [f"The number of rollout servers stays 1. {why}"]
    assert run.answer == (why, True, True)
    assert run.fleet.asked == run.pushed_to == []


def test_server_that_was_moved_to_another_node_counts_where_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.fleet.where = {"sluice-rollout-0": "far"}
    write_request(tmp_path, 1)
    run.polled()
    assert run.fleet.asked == [("add", "head")]


def test_server_that_does_not_start_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.fleet.failure = NeighbourError("sluice-rollout-1", "did not start: no memory")
    write_request(tmp_path, 1)
    assert run.polled() == ["The number of rollout servers stays 1. sluice-rollout-1: did not start: no memory"]
    assert run.count.names == ["sluice-rollout-0"]
    assert run.pushed_to == []


def test_wish_of_an_earlier_start_is_not_taken_up_again(tmp_path: Path) -> None:
    write_request(tmp_path, 1)
    assert Run(tmp_path).polled() == []


@pytest.mark.parametrize("num_polls", [0, 3])
def test_wish_that_the_end_of_an_attempt_cut_off_is_answered_by_the_next(tmp_path: Path, num_polls: int) -> None:
    first = Run(tmp_path)
    first.fleet.is_slow = True
    write_request(tmp_path, 1)
    first.polled(num_polls)
    assert Run(tmp_path).polled() == []
    text = "The run has begun again meanwhile, with 1 rollout servers. Give the command again."
    assert first.answer == (text, True, True)


def test_answer_to_a_wish_that_was_done_stands_after_the_run_began_again(tmp_path: Path) -> None:
    first = Run(tmp_path)
    write_request(tmp_path, 1)
    first.polled()
    done = first.answer
    Run(tmp_path)
    assert first.answer == done


def test_wish_that_comes_while_servers_leave_a_drained_node_is_told_that_it_is_next(tmp_path: Path) -> None:
    run = Run(tmp_path, ["sluice-rollout-0", "sluice-rollout-1"])
    run.fleet.where = {"sluice-rollout-0": "head", "sluice-rollout-1": "far"}
    run.drained = {"far"}
    run.polled(2)
    assert run.fleet.asked == [("add", "head")]  # another starts before the one there leaves
    write_request(tmp_path, -1)
    run.polled(2)
    text = "The run is told, and begins with it once that is done: servers are leaving a drained node."
    assert run.answer == (text, False, False)
    run.servers.do_answer = True
    for _ in range(10):
        run.watch.poll()
        run.polled(1)
    assert run.answer == ("Rollout servers were taken away: 1 are left.", True, False)
