"""The servers of a running attempt follow the wanted number and leave drained nodes."""

from pathlib import Path

import pytest

from learner.run.servers import compare_indexes
from protocol.errors import AwayError, OperatorError
from protocol.node.scale_request import write_request
from tests.learner.run.played_servers import PlayedRun, broken


def test_new_servers_start_where_the_plan_has_free_places_and_get_pushes_once_they_are_attached(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head")
    run.calls.is_new_silent = True
    write_request(tmp_path, 2)
    assert run.poll() == ["s1, s2 started: the run has 3 rollout servers"]
    assert run.calls.changes == [("add", "head", "far")]
    assert (run.calls.pushed_to, run.servers.names) == ([], ["s0", "s1", "s2"])
    assert run.reply == ("The run has 3 rollout servers.", True, False)
    run.calls.silent = set()
    assert run.poll() == ["s1 serves, from the next push on", "s2 serves, from the next push on"]
    assert run.calls.pushed_to == [("s0", "s1", "s2")]


def test_late_server_gets_pushes_once_it_serves(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far", late=["s0"])
    assert (run.servers.ready_names, run.servers.late_names) == (("s1",), ["s0"])
    assert run.poll() == run.calls.pushed_to == []
    run.calls.silent = set()
    assert "s0 serves, from the next push on" in run.poll()
    assert run.calls.pushed_to == [("s0", "s1")]


@pytest.mark.parametrize(
    ("late", "change", "removed", "left"),
    [
        ([], -2, ["s2", "s1"], ["s0"]),
        (["s0"], -1, ["s0"], ["s1", "s2"]),
        (["s0", "s1"], -1, ["s1"], ["s0", "s2"]),
    ],
)
def test_newest_servers_are_removed_but_first_those_that_do_not_serve(
    tmp_path: Path, late: list[str], change: int, removed: list[str], left: list[str]
) -> None:
    run = PlayedRun(tmp_path, "head", "far", "far", late=late)
    write_request(tmp_path, change)
    run.poll()
    assert run.calls.changes == [("remove", name) for name in removed]
    assert run.servers.names == left


def test_removed_server_gets_no_push_and_its_samples_are_released_when_it_is_gone(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far", "far")
    write_request(tmp_path, -2)
    run.calls.is_fleet_slow = True
    assert run.poll() == []
    assert run.calls.pushed_to == [("s0",)]
    assert run.calls.released == []  # they may still be sampling
    assert run.reply == ("Changing from 3 to 1 rollout servers.", False, False)
    run.calls.is_fleet_slow = False
    assert run.poll() == ["s2, s1 removed: the run has 1 rollout servers"]
    assert run.calls.released == ["s2", "s1"]
    assert run.reply == ("The run has 1 rollout servers.", True, False)


def test_server_that_died_while_it_was_removed_is_gone(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far")
    run.calls.fleet_error = broken("s1")
    write_request(tmp_path, -1)
    assert run.poll() == ["s1 removed: the run has 1 rollout servers"]
    assert run.calls.released == ["s1"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (-1, "The run has 1 rollout servers; -1 would leave 0."),
        (0, "The run has 1 rollout servers; +0 would leave 1."),
        (9, "The nodes hold 4 servers."),
    ],
)
def test_impossible_number_is_refused_and_nothing_changes(tmp_path: Path, change: int, reason: str) -> None:
    run = PlayedRun(tmp_path, "head")
    write_request(tmp_path, change)
    assert run.poll() == [f"The number of rollout servers stays 1. {reason}"]
    assert run.reply == (reason, True, True)
    assert run.calls.changes == run.calls.pushed_to == []


def test_server_that_moved_to_another_node_counts_there(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head")
    run.calls.where = {"s0": "far"}
    run.poll()
    write_request(tmp_path, 1)
    run.poll()
    assert run.calls.changes == [("add", "head")]


def test_request_for_a_server_that_does_not_start_is_refused(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head")
    run.calls.fleet_error = broken("s1")
    write_request(tmp_path, 1)
    assert run.poll() == ["The number of rollout servers stays 1. s1: did not start: no memory"]
    assert (run.servers.names, run.calls.pushed_to, run.reply[1:]) == (["s0"], [], (True, True))


def test_request_of_an_earlier_attempt_is_refused_unless_it_was_finished(tmp_path: Path) -> None:
    first = PlayedRun(tmp_path, "head")
    first.calls.is_fleet_slow = True
    write_request(tmp_path, 1)
    first.poll(3)
    second = PlayedRun(tmp_path, "head")
    assert second.poll() == []
    refused = ("The run restarted with 1 rollout servers. Give the command again.", True, True)
    assert second.reply == refused
    write_request(tmp_path, 1)
    second.poll()
    finished = second.reply
    assert PlayedRun(tmp_path, "head", "far").reply == finished != refused


def test_server_leaves_a_drained_node_after_its_replacement_serves(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far", drained=["far"])
    run.calls.is_new_silent = True
    run.poll()
    assert run.calls.changes == [("add", "head")]
    assert run.calls.released == []
    assert run.servers.drain_report("far").text == "s1 leaves the drained node."
    run.calls.silent = set()
    run.poll()
    assert run.calls.changes == [("add", "head"), ("remove", "s1")]
    assert (run.calls.pushed_to[-1], run.calls.released) == (("s0", "s2"), ["s1"])
    assert run.servers.drain_report("far").is_over


def test_server_leaves_without_a_replacement_where_no_node_has_room_and_others_serve(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far", drained=["far"])
    run.calls.capacity = 1
    assert run.poll() == [
        "s1 leaves a drained node without a replacement. The nodes hold 1 servers.",
        "s1 removed: the run has 1 rollout servers",
    ]
    assert run.servers.num_wanted == 1


def test_as_many_replacements_start_as_have_room(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far", "far", drained=["far"])
    run.calls.capacity = 2
    run.poll(20)
    assert run.calls.changes == [("add", "head"), ("remove", "s2"), ("remove", "s1")]
    assert run.servers.names == ["s0", "s3"]


def test_last_serving_server_stays_until_another_node_has_room(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far", drained=["head", "far"])
    run.calls.capacity = 0
    text = "Rollout servers stay on a drained node: the run needs them. The nodes hold 0 servers."
    assert run.poll() == [text]
    assert run.servers.drain_report("far").is_stuck
    run.now = 61.0
    assert run.poll() == []  # tried again, and reported once
    run.calls.capacity = 4
    run.drain("far")
    run.poll(20)
    assert run.servers.names == ["s0", "s2"]
    assert run.servers.drain_report("far").is_over


def test_last_serving_server_stays_until_a_late_one_serves(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far", late=["s0"], drained=["far"])
    run.calls.capacity = 1
    run.poll()
    assert run.calls.changes == []
    assert run.servers.drain_report("far").is_stuck
    run.calls.silent = set()
    run.poll()
    run.now = 61.0
    run.poll()
    assert run.calls.changes == [("remove", "s1")]
    assert run.calls.pushed_to[-1] == ("s0",)


@pytest.mark.parametrize(("late", "left"), [([], ["s0"]), (["s0"], ["s0", "s1"])])
def test_replacement_that_does_not_start_matters_only_to_the_last_serving_server(
    tmp_path: Path, late: list[str], left: list[str]
) -> None:
    run = PlayedRun(tmp_path, "head", "far", late=late, drained=["far"])
    run.poll(1)
    run.calls.fleet_error = broken("s2")
    messages = run.poll()
    assert messages[0].endswith("s2: did not start: no memory")
    assert run.servers.names == left


def test_replacement_that_never_serves_is_removed_and_another_is_tried(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far", drained=["far"])
    run.calls.errors = {"s2": broken("s2")}
    messages = run.poll(40)
    assert "s2 did not come to serve" in messages
    assert run.calls.changes == [("add", "head"), ("remove", "s2"), ("add", "head"), ("remove", "s1")]
    assert run.servers.names == ["s0", "s3"]


def test_server_that_ray_restarted_on_a_drained_node_leaves_too(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "head", drained=["far"])
    run.poll()
    assert run.calls.changes == []
    run.calls.where["s1"] = "far"
    run.poll(20)
    assert run.calls.changes == [("add", "head"), ("remove", "s1")]


def test_server_without_a_process_may_be_on_a_drained_node(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far", drained=["far"])
    run.calls.errors = {"s1": AwayError("s1", "is restarting")}
    run.poll()
    report = run.servers.drain_report("far")
    assert (report.text, report.is_over) == ("s1 does not answer, and may be there.", False)
    run.calls.errors = {}
    run.poll(20)
    assert ("remove", "s1") in run.calls.changes
    assert run.servers.drain_report("far").is_over


@pytest.mark.parametrize(("change", "left"), [(1, 3), (-1, 1)])
def test_number_changes_while_servers_leave_a_drained_node(tmp_path: Path, change: int, left: int) -> None:
    run = PlayedRun(tmp_path, "head", "far", drained=["far"])
    run.poll(2)
    assert run.calls.changes == [("add", "head")]
    write_request(tmp_path, change)
    run.poll(40)
    assert len(run.servers.names) == left
    assert "s1" not in run.servers.names
    assert run.reply == (f"The run has {left} rollout servers.", True, False)


def test_no_server_starts_on_a_shared_device_while_a_rank_trains_there(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head")
    for _ in range(4):
        run.servers.poll(may_start=False)
    assert run.calls.asked == []


@pytest.mark.parametrize("digests", [{}, {"s0": "a1", "s1": "a1"}, {"s0": "", "s1": ""}, {"s0": "a1", "s1": ""}])
def test_servers_that_search_one_index_or_none_are_accepted(digests: dict[str, str]) -> None:
    assert compare_indexes(digests, "refuse") is None


def test_servers_with_other_indexes_are_named_or_refused() -> None:
    digests = {"s0": "a1", "s1": "a1", "s2": "b2"}
    assert "s0 searches a1, s1 searches a1, s2 searches b2" in str(compare_indexes(digests, "warn"))
    with pytest.raises(OperatorError, match=r"s2 searches b2.* With retriever\.other_index = warn the run continues\."):
        compare_indexes(digests, "refuse")


def test_refused_server_is_compared_with_no_other(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "head", "far", "far", other_index="refuse")
    run.servers.note_attached({"s0": {"content_hash": "a1"}})
    with pytest.raises(OperatorError, match="s1 searches b2"):
        run.servers.note_attached({"s1": {"content_hash": "b2"}})
    assert run.servers.note_attached({"s2": {"content_hash": "a1"}}) == []
