"""One server of a run: what follows from each of its answers."""

from collections.abc import Mapping
from typing import Any

import pytest

from learner.run.server import RunServer, ServerState
from protocol.errors import AwayError, NeighbourError, OperatorError
from tests.learner.run.played_servers import OURS, SPEC, PlayedCalls

_BACK = "its leases went back, and it is started again"


class Watched:
    """A server that serves the run, its calls, and a clock."""

    def __init__(self, run: Mapping[str, Any] | None = OURS) -> None:
        self.calls = PlayedCalls()
        self.calls.runs["s0"] = run
        self.now = 0.0
        self.server = RunServer("s0", SPEC, self.calls, self.check, lambda: self.now)
        self.server.begin_serving()
        self.refusal: str | None = None

    def check(self, runs: Mapping[str, Any]) -> list[str]:
        if self.refusal is not None:
            raise OperatorError(self.refusal)
        return []

    def poll(self, times: int = 2, each_s: float = 0.0) -> list[str]:
        messages = []
        for _ in range(times):
            messages += self.server.poll()
            self.now += each_s
        return messages

    @property
    def methods(self) -> list[str]:
        return [method for _, method in self.calls.asked]


def test_server_of_this_attempt_is_left_alone() -> None:
    watched = Watched()
    assert (watched.poll(), watched.calls.lost, watched.methods) == ([], [], ["describe"])


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (None, "it was restarted"),
        ({**OURS, "run_id": "run-B"}, "it serves another run, run-B"),
        ({**OURS, "incarnation": 2}, "it serves another start of this run"),
        ({**OURS, "ended": "the coordinator refused"}, "its session ended: the coordinator refused"),
    ],
)
def test_server_of_another_attempt_loses_its_leases_and_is_started_and_attached(
    run: dict[str, Any] | None, reason: str
) -> None:
    watched = Watched(run)
    assert watched.poll() == [f"s0 stopped serving ({reason}); {_BACK}"]
    assert watched.calls.lost == [("s0", reason)]
    assert watched.poll() == ["s0 serves again, from the next push on"]
    assert watched.methods == ["describe", "start", "attach"]


def test_server_with_another_index_is_detached_and_never_started_again() -> None:
    watched = Watched(None)
    watched.refusal = "s0 searches another index."
    assert watched.poll(12)[1:] == ["s0 failed: s0 searches another index."]
    assert watched.methods[:4] == ["describe", "start", "attach", "detach"]
    assert set(watched.methods[4:]) == {"describe"}
    assert (watched.server.state, watched.server.may_serve) == (ServerState.FAILED, False)


def test_server_with_another_index_that_could_not_be_detached_does_not_serve() -> None:
    watched = Watched(None)
    watched.refusal = "s0 searches another index."
    watched.calls.errors["detach"] = NeighbourError("s0", "it did not answer")
    watched.poll(4)
    watched.calls.runs["s0"] = OURS
    watched.poll(12)
    assert (watched.server.state, watched.server.may_serve) == (ServerState.FAILED, False)
    assert watched.methods.count("detach") > 1
    assert set(watched.methods[3:]) == {"describe", "detach"}


def test_server_that_never_serves_fails_after_five_restarts() -> None:
    watched = Watched({**OURS, "run_id": "run-B"})
    messages = watched.poll(60)
    assert watched.methods.count("start") == 5
    assert messages[-1] == "s0 failed after 5 restarts; last: it serves another run, run-B"


@pytest.mark.parametrize(("served_s", "has_failed"), [(62.0, False), (5.0, True)])
def test_restarts_count_again_from_zero_after_a_minute_of_service(served_s: float, has_failed: bool) -> None:
    watched, messages = Watched(), list[str]()
    for _ in range(8):
        watched.calls.runs["s0"] = None
        messages += watched.poll(4)
        watched.calls.runs["s0"] = OURS
        watched.poll(2)
        watched.now += served_s
        watched.poll(2)
    assert any("failed after 5 restarts" in message for message in messages) is has_failed


@pytest.mark.parametrize("error", [AwayError("s0", "died"), NeighbourError("s0", "died")])
def test_server_that_dies_at_each_start_fails_once(error: Exception) -> None:
    watched = Watched(None)
    watched.calls.errors = {"start": error}
    messages = watched.poll(60)
    assert len(messages) == 2
    assert messages[1].startswith("s0 failed after 5 restarts; last: ")


def test_server_without_a_process_is_awaited_and_attached_when_a_node_has_room() -> None:
    watched = Watched()
    watched.calls.errors = {"s0": AwayError("s0", "died: it is restarting")}
    assert watched.poll(250, each_s=2.0) == [f"s0 stopped serving (s0: died: it is restarting); {_BACK}"]
    assert watched.server.may_serve
    watched.calls.errors, watched.calls.runs["s0"] = {}, None
    assert watched.poll(4) == ["s0 serves again, from the next push on"]
    assert watched.methods[-3:] == ["start", "attach", "describe"]


def test_server_without_a_process_for_ten_minutes_has_no_hope() -> None:
    watched = Watched()
    watched.calls.errors = {"s0": AwayError("s0", "died")}
    watched.poll(300, each_s=2.0)
    assert watched.server.may_serve
    watched.now = 605.0
    assert not watched.server.may_serve


def test_silent_server_is_named_once_and_keeps_its_leases() -> None:
    watched = Watched()
    for _ in range(2):
        watched.calls.silent = {"s0"}
        silence = "s0 has not answered for 30 s; the run continues without it until it does"
        assert watched.poll(60, each_s=2.0) == [silence]
        assert watched.calls.lost == []
        watched.calls.silent = set()
        watched.poll()


def test_engine_that_loads_slowly_is_not_silent() -> None:
    watched = Watched(None)
    watched.poll()
    watched.calls.silent = {"s0"}
    assert watched.poll(60, each_s=10.0) == []


def test_server_is_named_with_its_last_node_on_a_cluster_of_several() -> None:
    watched = Watched()
    watched.calls.node_ip = "10.0.0.3"
    watched.poll()
    watched.calls.runs["s0"], watched.calls.node_ip = None, "10.0.0.4"
    assert watched.poll(5) == [
        f"s0 on node 10.0.0.4 stopped serving (it was restarted); {_BACK}",
        "s0 on node 10.0.0.4 serves again, from the next push on",
    ]
