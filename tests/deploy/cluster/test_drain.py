"""`deploy.cluster drain NODE | undrain NODE`. Ray's nodes and marks are set, the fleet answers from here."""

from typing import Any

import pytest

from deploy.cluster import drain as command
from deploy.cluster.drain import drain_node, undrain_node
from protocol.errors import OperatorError
from protocol.node.ray_nodes import DrainReport

_HEAD, _FAR = "a" * 56, "b" * 56
_NODES = [
    {
        "NodeID": _HEAD,
        "NodeManagerAddress": "10.0.0.1",
        "RayletSocketName": "raylet",
        "Alive": True,
        "Resources": {"node:__internal_head__": 1.0},
    },
    {"NodeID": _FAR, "NodeManagerAddress": "10.0.0.2", "RayletSocketName": "raylet", "Alive": True, "Resources": {}},
    {
        "NodeID": "c" * 56,
        "NodeManagerAddress": "10.0.0.3",
        "RayletSocketName": "raylet",
        "Alive": False,
        "Resources": {},
    },
]


class Cluster:
    """What the command sees of it, and what it did."""

    def __init__(self) -> None:
        self.is_lending = True
        self.words: list[DrainReport | None] = []  # what the run says, look by look; the last one stays
        self.marked: set[str] = set()
        self.stopped: list[str] = []
        self.servers: list[dict[str, Any]] = [
            {"name": "sluice-rollout-0", "node_id": _HEAD},
            {"name": "sluice-rollout-1", "node_id": _FAR},
        ]

    def said(self, node_id: str) -> DrainReport | None:
        return self.words.pop(0) if len(self.words) > 1 else self.words[0]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    played = Cluster()
    replaced: dict[str, Any] = {
        "drain": played.marked.add,
        "undrain": played.marked.discard,
        "read_drain_report": played.said,
        "describe_fleet": lambda _: {"is_lending": played.is_lending},
        "describe_servers": lambda _: played.servers,
        "stop_server": lambda name, _: played.stopped.append(name),
        "_POLL_S": 0.0,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(command, name, value)
    monkeypatch.setattr("ray.nodes", lambda: _NODES)
    return played


def test_servers_that_no_run_uses_are_stopped(cluster: Cluster) -> None:
    cluster.is_lending = False
    assert drain_node(["10.0.0.2"]).startswith("Node 10.0.0.2 is drained: only its services are there")
    assert cluster.stopped == ["sluice-rollout-1"]
    assert cluster.marked == {_FAR}


def test_servers_that_do_not_say_where_they_are_are_named(cluster: Cluster) -> None:
    cluster.is_lending = False
    cluster.servers.insert(0, {"name": "sluice-rollout-2", "is_alive": False})
    with pytest.raises(OperatorError, match=r"^drain: sluice-rollout-2 does not answer, and may be there\."):
        drain_node(["10.0.0.2"])
    assert cluster.stopped == ["sluice-rollout-1"]
    assert cluster.marked == {_FAR}


def test_run_is_waited_for_until_it_has_left(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    leaving = DrainReport(text="sluice-rollout-1 leaves.")
    cluster.words = [None, leaving, leaving, DrainReport(text="Nothing is there.", is_over=True)]
    assert drain_node(["10.0.0.2"]).startswith("Node 10.0.0.2 is drained")
    assert capsys.readouterr().out == "Node 10.0.0.2 takes no new servers or ranks.\nsluice-rollout-1 leaves.\n"
    assert cluster.stopped == []  # they are the run's to end


def test_what_has_to_stay_is_said_and_the_mark_stays(cluster: Cluster) -> None:
    cluster.words = [DrainReport(text="No other node has room.", is_stuck=True)]
    with pytest.raises(OperatorError, match=r"^drain: No other node has room\. The node stays marked"):
        drain_node(["10.0.0.2"])
    assert cluster.marked == {_FAR}


def test_run_that_does_not_answer_is_told_and_the_mark_stays(cluster: Cluster) -> None:
    cluster.words = [None]
    with pytest.raises(OperatorError, match="the run has not answered within 0 s"):
        drain_node(["10.0.0.2"], reply_s=0.0)
    assert cluster.marked == {_FAR}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give one node by its address"),
        (["10.0.0.2", "10.0.0.1"], "give one node by its address"),
        (["10.0.0.3"], r"the cluster has no node 10\.0\.0\.3\. There are 10\.0\.0\.1, 10\.0\.0\.2\."),
        (["10.0.0.1"], "10.0.0.1 is the head"),
    ],
)
def test_node_that_cannot_be_drained_is_refused(cluster: Cluster, arguments: list[str], why: str) -> None:
    with pytest.raises(OperatorError, match=why):
        drain_node(arguments)
    assert cluster.marked == set()


def test_node_takes_processes_again_after_undrain(cluster: Cluster) -> None:
    cluster.marked.add(_FAR)
    assert undrain_node(["10.0.0.2"]).startswith("Node 10.0.0.2 takes servers and ranks again.")
    assert cluster.marked == set()
