"""What the driver makes of a server's own description: whose run it serves, and what is done when it is not ours."""

from collections.abc import Mapping
from typing import Any

import pytest

from learner.run.server_watch import ServerWatch
from protocol.errors import AwayError, NeighbourError, OperatorError
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings

_OURS = {"run_id": "run-A", "incarnation": 2, "ended": None}
_OURS_NOW = {"run_id": "r", "incarnation": 1, "ended": None}  # of what `watched` returns


class Servers:
    """`ServerCalls` to a server that answers at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: list[Any] = []
        self.run: dict[str, Any] | None = _OURS
        self.node_ip = "127.0.0.1"

    def ask(self, name: str, method: str, *arguments: Any) -> dict[str, Any]:
        self.asked.append(method)
        self.told += arguments
        return {"run": self.run, "node_ip": self.node_ip}

    def is_done(self, reference: Any) -> bool:
        return True

    def result(self, reference: Any, name: str) -> Any:
        return reference


def polled(run: dict[str, Any] | None, num_polls: int = 2) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """Return (messages, what the coordinator was told, what the server was asked) after it described this run."""
    lost: list[tuple[str, str]] = []
    servers = Servers()
    servers.run = run
    spec = run_spec(Settings(), "run-A", 2, "tcp://127.0.0.1:1")
    watch = ServerWatch(
        ["sluice-rollout-0"],
        spec,
        lambda name, why: lost.append((name, why)),
        servers,
    )
    messages = [message for _ in range(num_polls) for message in watch.poll()]
    return messages, lost, servers.asked


def test_server_that_serves_this_start_of_the_run_is_left_alone() -> None:
    assert polled(_OURS) == ([], [], ["describe"])


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (None, "it was restarted"),
        ({**_OURS, "run_id": "run-B"}, "it serves another run, run-B"),
        ({**_OURS, "incarnation": 1}, "it serves another start of this run"),
        ({**_OURS, "ended": "the coordinator refused"}, "its session ended: the coordinator refused"),
    ],
)
def test_server_that_does_not_serve_this_start_is_lost_and_started(run: dict[str, Any] | None, reason: str) -> None:
    messages, lost, asked = polled(run)
    assert lost == [("sluice-rollout-0", reason)]
    assert messages == [f"sluice-rollout-0 stopped serving ({reason}); its leases went back, it is being started again"]
    assert asked == ["describe", "start"]


def test_server_that_was_started_again_is_attached_and_serves() -> None:
    messages, _, asked = polled(None, num_polls=4)
    assert asked == ["describe", "start", "attach"]
    assert messages[-1] == "sluice-rollout-0 serves again, from the next push on"


def test_server_that_may_not_serve_forgets_the_run_and_is_given_up() -> None:
    def refuse(runs: Mapping[str, Any]) -> None:
        raise OperatorError(f"{', '.join(runs)} searches another index.")

    servers, lost = Servers(), list[tuple[str, str]]()
    servers.run = None
    spec = run_spec(Settings(), "run-A", 2, "tcp://127.0.0.1:1")
    watch = ServerWatch([], spec, lambda name, why: lost.append((name, why)), servers, check=refuse)
    watch.add(["s0"])
    messages = [message for _ in range(12) for message in watch.poll()]
    assert messages == ["s0 is given up: s0 searches another index."]
    assert lost == [("s0", "s0 searches another index.")]
    assert servers.asked[:4] == ["describe", "start", "attach", "detach"]
    assert set(servers.asked[4:]) == {"describe"}
    assert (watch.num_hopeful, watch.num_serving) == (0, 0)


def test_server_that_never_serves_is_given_up_after_five_restarts() -> None:
    messages, lost, asked = polled({**_OURS, "run_id": "run-B"}, num_polls=60)
    assert len(lost) == 6
    assert asked.count("start") == 5
    assert messages[-1] == "sluice-rollout-0 is given up after 5 restarts; last: it serves another run, run-B"


def test_server_that_has_served_for_a_minute_is_started_again_as_if_for_the_first_time() -> None:
    servers, now = Servers(), [1000.0]
    servers.run = None
    watch = watched(servers, now)
    for _ in range(12):
        servers.run = None
        while servers.asked[-1:] != ["attach"]:
            assert "given up" not in "".join(watch.poll())
        servers.run = _OURS_NOW
        for _ in range(4):
            watch.poll()
            now[0] += 31.0
    assert watch.num_serving == 1
    for _ in range(6):
        servers.run = None
        for _ in range(4):
            watch.poll()
    assert watch.num_hopeful == 0


def test_server_that_dies_seconds_after_each_start_is_given_up() -> None:
    servers, now = Servers(), [0.0]
    servers.run = _OURS_NOW
    watch = watched(servers, now)
    now[0] = 1000.0  # it had served for long
    told: list[str] = []
    for _ in range(6):
        told += [message for _ in range(4) for message in watch.poll()]  # started, attached and judged
        now[0] += 5.0
        servers.run = None
        told += [message for _ in range(2) for message in watch.poll()]
        servers.run = _OURS_NOW
    assert told[-1].startswith("s0 is given up after 5 restarts")


def test_server_that_is_back_after_it_was_out_of_reach_is_attached_again() -> None:
    servers = FailingServers()
    servers.run, servers.raised = _OURS_NOW, {"describe": AwayError("s0", "died: out of reach")}
    watch = watched(servers, [0.0])
    for _ in range(4):
        watch.poll()
    servers.raised, num_asked = {}, len(servers.asked)
    messages = [message for _ in range(4) for message in watch.poll()]
    assert servers.asked[num_asked:] == ["start", "attach", "describe"]
    assert messages == ["s0 serves again, from the next push on"]


def test_engine_that_loads_for_long_is_not_called_silent() -> None:
    class Loading(Servers):
        def is_done(self, reference: Any) -> bool:
            return self.asked[-1] != "start"

    servers, now = Loading(), [0.0]
    servers.run = None
    watch = watched(servers, now)
    messages = []
    for _ in range(60):
        messages += watch.poll()
        now[0] += 10.0
    assert len(messages) == 1
    assert "it is being started again" in messages[0]


def test_server_that_does_not_answer_is_named_once_and_left_alone() -> None:
    class SilentServers(Servers):
        is_silent = True

        def is_done(self, reference: Any) -> bool:
            return not self.is_silent

    servers, now, lost = SilentServers(), [0.0], list[tuple[str, str]]()
    spec = run_spec(Settings(), "run-A", 2, "tcp://127.0.0.1:1")
    watch = ServerWatch(["sluice-rollout-0"], spec, lambda name, why: lost.append((name, why)), servers, lambda: now[0])
    messages = []
    for _ in range(60):
        messages += watch.poll()
        now[0] += 2.0
    assert messages == ["sluice-rollout-0 has not answered for 30 s; the run goes on without it until it does"]
    assert (lost, servers.asked) == ([], ["describe"])

    servers.is_silent = False
    watch.poll()
    servers.is_silent = True
    for _ in range(60):
        messages += watch.poll()
        now[0] += 2.0
    assert len(messages) == 2


def test_server_is_named_with_the_node_that_it_was_last_on_where_there_are_several() -> None:
    servers = Servers()
    servers.node_ip = "10.0.0.3"
    watch = ServerWatch(["s2"], run_spec(Settings(), "run-A", 2, "tcp://10.0.0.1:1"), lambda name, why: None, servers)
    for _ in range(2):
        assert watch.poll() == []
    servers.run, servers.node_ip = None, "10.0.0.4"  # its node is gone: Ray has started it on another one
    messages = [message for _ in range(5) for message in watch.poll()]
    reason = "its leases went back, it is being started again"
    assert messages == [
        f"s2 on node 10.0.0.4 stopped serving (it was restarted); {reason}",
        "s2 on node 10.0.0.4 serves again, from the next push on",
    ]


class FailingServers(Servers):
    """Answer to one method, or to all of them, with an error."""

    def __init__(self) -> None:
        super().__init__()
        self.raised: dict[str, Exception] = {}

    def result(self, reference: Any, name: str) -> Any:
        error = self.raised.get(self.asked[-1])
        if error is not None:
            raise error
        return reference


def watched(servers: Servers, now: list[float]) -> ServerWatch:
    return ServerWatch(["s0"], run_spec(Settings(), "r", 1, "a"), lambda name, why: None, servers, lambda: now[0])


def test_server_whose_node_is_gone_is_used_again_when_another_node_has_room_for_it() -> None:
    servers, now = FailingServers(), [0.0]
    servers.raised = {method: AwayError("s0", "died: it is restarting") for method in ("describe", "start", "attach")}
    watch = watched(servers, now)
    messages = []
    for _ in range(250):
        messages += watch.poll()
        now[0] += 2.0
    away = "s0 stopped serving (s0: died: it is restarting); its leases went back, it is being started again"
    assert messages == [away]
    assert (watch.num_hopeful, watch.num_serving) == (1, 0)

    servers.raised, servers.run = {}, None
    assert [message for _ in range(4) for message in watch.poll()] == ["s0 serves again, from the next push on"]
    assert servers.asked[-4:] == ["describe", "start", "attach", "describe"]


def test_server_that_has_been_away_for_ten_minutes_is_no_hope() -> None:
    servers, now = FailingServers(), [0.0]
    servers.raised = {"describe": AwayError("s0", "died")}
    watch = watched(servers, now)
    for now[0] in range(0, 600, 2):
        watch.poll()
    assert watch.num_hopeful == 1
    now[0] = 605.0
    assert watch.num_hopeful == 0


@pytest.mark.parametrize("error", [AwayError("s0", "died"), NeighbourError("s0", "died")])
def test_server_whose_process_dies_of_each_start_is_given_up_once(error: Exception) -> None:
    servers = FailingServers()
    servers.run, servers.raised = None, {"start": error}
    watch = watched(servers, [0.0])
    messages = [message for _ in range(60) for message in watch.poll()]
    assert len(messages) == 2
    assert messages[1].startswith("s0 is given up after 5 restarts; last: ")
    assert watch.num_hopeful == 0
