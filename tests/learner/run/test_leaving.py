"""Servers that leave a drained node while a run goes on, with a fleet that answers when the test lets it."""

from pathlib import Path

import pytest

from protocol.errors import NeighbourError
from protocol.node.scale_request import write_request
from tests.learner.run.counted_run import Run

_OLD = ["sluice-rollout-0", "sluice-rollout-1"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with a server on each of two nodes, of which the second is drained."""
    run = Run(tmp_path, _OLD)
    run.fleet.where = {"sluice-rollout-0": "head", "sluice-rollout-1": "far"}
    run.drained = {"far"}
    return run


def polled(run: Run, times: int = 12) -> list[str]:
    """Poll servers and their number as a run's command does; returns what the user is told."""
    return [message for _ in range(times) for message in [*run.watch.poll(), *run.count.poll()]]


def test_another_server_serves_before_the_one_on_a_drained_node_is_taken_away(run: Run) -> None:
    polled(run)
    assert run.fleet.asked == [("add", "head")]
    assert run.pushed_to == [(*_OLD, "sluice-rollout-2")]
    assert run.released == []
    assert not run.words["far"].is_over
    run.servers.do_answer = True
    polled(run)
    assert run.fleet.asked == [("add", "head"), ("remove", "sluice-rollout-1")]
    assert run.pushed_to[-1] == ("sluice-rollout-0", "sluice-rollout-2")
    assert run.released == ["sluice-rollout-1"]
    assert run.words["far"].is_over


def test_server_leaves_without_another_in_its_place_where_no_node_has_room(run: Run) -> None:
    run.capacity = 1
    assert polled(run) == [
        "sluice-rollout-1 leaves what is drained without another in its place. The nodes hold 1 servers.",
        "Rollout servers were taken away: 1 are left.",
    ]
    assert run.fleet.asked == [("remove", "sluice-rollout-1")]
    assert run.count.names == ["sluice-rollout-0"]
    assert run.words["far"].is_over


def test_as_many_take_over_as_have_room(tmp_path: Path) -> None:
    names = [*_OLD, "sluice-rollout-2"]
    run = Run(tmp_path, names)
    run.fleet.where = dict(zip(names, ["head", "far", "far"], strict=True))
    run.drained, run.capacity, run.servers.do_answer = {"far"}, 2, True
    polled(run)
    assert run.fleet.asked == [("add", "head"), ("remove", "sluice-rollout-1"), ("remove", "sluice-rollout-2")]
    assert run.count.names == ["sluice-rollout-0", "sluice-rollout-3"]


def test_last_server_stays_until_another_node_has_room(run: Run) -> None:
    run.capacity = 0
    run.drained = {"head", "far"}
    assert polled(run) == [
        "Rollout servers stay on a drained node. No other node has room for a rollout server, and the run needs one. "
        "The nodes hold 0 servers."
    ]
    assert run.words["far"].is_stuck
    assert run.count.names == _OLD
    run.now = 61.0
    assert polled(run) == []  # tried again, and told once
    run.capacity, run.drained = 4, {"far"}
    run.servers.do_answer = True
    run.now = 122.0
    polled(run)
    assert run.count.names == ["sluice-rollout-0", "sluice-rollout-2"]
    assert run.words["far"].is_over


def test_last_server_that_serves_stays_until_one_that_is_still_late_serves(tmp_path: Path) -> None:
    run = Run(tmp_path, _OLD, late=["sluice-rollout-0"])
    run.fleet.where = {"sluice-rollout-0": "head", "sluice-rollout-1": "far"}
    run.drained, run.capacity = {"far"}, 1
    polled(run)
    assert run.fleet.asked == run.pushed_to == []
    assert run.words["far"].is_stuck
    run.servers.do_answer = True
    polled(run)
    run.now = 61.0
    polled(run)
    assert run.fleet.asked == [("remove", "sluice-rollout-1")]
    assert run.pushed_to[-1] == ("sluice-rollout-0",)


def test_engine_that_does_not_start_elsewhere_leaves_the_last_server_that_serves_where_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, _OLD, late=["sluice-rollout-0"])
    run.fleet.where = {"sluice-rollout-0": "head", "sluice-rollout-1": "far"}
    run.drained = {"far"}
    polled(run, times=2)
    assert run.fleet.asked == [("add", "head")]
    run.fleet.failure = NeighbourError("sluice-rollout-2", "did not start: no memory")
    assert polled(run) == ["Rollout servers stay on a drained node. sluice-rollout-2: did not start: no memory"]
    assert run.count.names == _OLD


def test_engine_that_does_not_start_elsewhere_lets_the_others_serve_alone(run: Run) -> None:
    add, is_broken = run.fleet.add, [True]
    result = run.fleet.result

    def fail(reference: object) -> object:
        if reference == "new" and is_broken:
            raise NeighbourError("sluice-rollout-2", "did not start: no memory")
        return result(reference)

    run.fleet.add = lambda planned, nodes: add(planned, nodes) and "new"  # type: ignore[method-assign]
    run.fleet.result = fail  # type: ignore[method-assign]
    told = polled(run)
    assert "sluice-rollout-1 leaves without another in its place. sluice-rollout-2: did not start: no memory" in told
    assert run.count.names == ["sluice-rollout-0"]


def test_server_that_ray_started_again_on_a_drained_node_leaves_too(run: Run) -> None:
    run.servers.do_answer = True
    polled(run)
    run.fleet.where["sluice-rollout-2"] = "far"
    polled(run)
    assert ("remove", "sluice-rollout-2") not in run.fleet.asked  # asked again every ten seconds
    run.now = 11.0
    polled(run)
    assert ("remove", "sluice-rollout-2") in run.fleet.asked


def test_server_that_does_not_answer_is_not_taken_for_gone_from_a_drained_node(run: Run) -> None:
    where = run.fleet.where
    run.fleet.where = {"sluice-rollout-0": "head"}  # Ray starts the other one again, or it hangs
    polled(run)
    assert run.words["far"].text == "sluice-rollout-1 does not answer, and may be there."
    assert not run.words["far"].is_over
    run.fleet.where, run.servers.do_answer, run.now = where, True, 11.0
    polled(run)
    assert ("remove", "sluice-rollout-1") in run.fleet.asked
    assert run.words["far"].is_over


def test_another_is_tried_where_a_server_never_comes_to_serve(run: Run) -> None:
    run.servers.do_answer = True
    run.servers.broken = {"sluice-rollout-2"}
    told = polled(run, times=14)
    assert "sluice-rollout-2 did not come to serve: what was to leave stays for now." in told
    assert ("remove", "sluice-rollout-2") in run.fleet.asked
    assert ("remove", "sluice-rollout-1") not in run.fleet.asked
    polled(run, times=30)
    assert run.fleet.asked[2:] == [("add", "head"), ("remove", "sluice-rollout-1")]
    assert run.count.names == ["sluice-rollout-0", "sluice-rollout-3"]
    assert run.words["far"].is_over


def test_wish_for_another_number_comes_first(run: Run) -> None:
    write_request(run.folder, 1)
    run.servers.do_answer = True
    polled(run, times=30)
    assert run.fleet.asked[0][0] == "add"
    assert run.words["far"].is_over
    assert len(run.count.names) == 3
