"""The table of nodes. Ray's list of nodes is set, keepers and fleet answer from here."""

from typing import Any

import pytest

from deploy.cluster import fleet_client
from deploy.cluster.tables import Row, node_rows, server_row, show_nodes, show_rows
from protocol.errors import OperatorError
from protocol.ray_calls import keeper_of


def _node(letter: str, address: str, is_alive: bool = True, **resources: float) -> dict[str, Any]:
    place = {"NodeManagerAddress": address, "RayletSocketName": "raylet"}
    return {"NodeID": letter * 56, **place, "Alive": is_alive, "Resources": resources}


_NODES = [
    _node("b", "10.0.0.2", GPU=2.0),
    _node("a", "10.0.0.1", **{"node:__internal_head__": 1.0}),
    _node("c", "10.0.0.3", is_alive=False),
    _node("d", "10.0.0.2", is_alive=False),  # as it was before it came back
    _node("e", "10.0.0.4"),
    _node("f", "10.0.0.5"),
]
_KEEPERS = {keeper_of("a" * 56): 1.0, keeper_of("b" * 56): 2.0, keeper_of("e" * 56): None}


class PlayedKeeper:
    """A keeper's handle. answer: None: it says nothing."""

    def __init__(self, answer: float | None) -> None:
        self.clock = self
        self._answer = answer

    def remote(self) -> "PlayedKeeper":
        return self

    def result(self) -> float:
        if self._answer is None:
            raise OperatorError("The keeper did not answer within 10 s.")
        return self._answer


@pytest.fixture(autouse=True)
def _cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_actor(name: str, namespace: str) -> PlayedKeeper:
        if name not in _KEEPERS:
            raise ValueError(name)
        return PlayedKeeper(_KEEPERS[name])

    monkeypatch.setattr("ray.nodes", lambda: _NODES)
    monkeypatch.setattr("ray.get_actor", get_actor)
    monkeypatch.setattr(fleet_client, "ask", lambda reference, *_: reference.result())
    servers = [{"node_ip": "10.0.0.2", "is_alive": True}] * 2 + [{"node_ip": "10.0.0.2", "is_alive": False}]
    monkeypatch.setattr(fleet_client, "describe_servers", lambda _: servers)


def test_every_node_has_one_row_and_the_head_is_first() -> None:
    seen = [(row.address, row.is_head, row.state, row.num_servers, row.num_gpus) for row in node_rows()]
    assert seen == [
        ("10.0.0.1", True, "ready", 0, 0.0),
        ("10.0.0.2", False, "ready", 2, 2.0),
        ("10.0.0.3", False, "gone", 0, 0.0),
        ("10.0.0.4", False, "silent", 0, 0.0),
        ("10.0.0.5", False, "starting", 0, 0.0),
    ]


def test_table_shows_gpus_and_sums(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show_nodes(node_rows())
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "10.0.0.2" in line)
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["ready", "2", "2"]
    assert shown.splitlines()[-1] == "In all: nodes 4, GPUs 2, rollout servers 2."


LOG = "/home/somebody/a/long/way/down/to/the/folder/of/this/cluster/.sluice/logs/retriever.log"


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_log_is_whole_on_one_line(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    show_rows(
        "Sluice", [Row("ray", True, "healthy", "127.0.0.1:6379", 7, "/r"), Row("retriever", True, "", "", 8, LOG)]
    )
    assert capsys.readouterr().out.splitlines()[-2:] == ["ray        /r", f"retriever  {LOG}"]


def test_trouble_is_told_under_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows("Sluice", [Row("reward", False, "down", "http://a", 7, "/r", "ended 4 times in a row")])
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == ["reward: ended 4 times in a row", "reward  /r"]


def test_server_that_does_not_answer_is_down() -> None:
    server = {"name": "sluice-rollout-0", "is_alive": False, "node_ip": "", "pid": 0, "log": ""}
    assert server_row(server) == Row("sluice-rollout-0", False, "down", "", 0, "")


def test_names_in_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows("Sluice", [Row("reward", True, "healthy", "[/here] :100:", 7, "/r")])
    assert "[/here] :100:" in capsys.readouterr().out
