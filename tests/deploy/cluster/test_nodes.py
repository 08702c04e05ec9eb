"""Nodes that are ready, and a table without an answer of the fleet. Ray's list of nodes and actors is set."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from deploy.cluster import fleet_client, keeper_client, tables
from deploy.cluster.keeper_client import await_nodes
from deploy.node.home import Home
from protocol.errors import NeighbourError, OperatorError
from protocol.node.home import ClusterState, ProcessRecord
from protocol.ray_calls import keeper_of
from tests.fakes.cluster_state import cluster_state

_JOINED = [
    {"NodeID": "a" * 56, "NodeManagerAddress": "10.0.0.1", "RayletSocketName": "raylet", "Alive": True},
    {"NodeID": "b" * 56, "NodeManagerAddress": "10.0.0.2", "RayletSocketName": "raylet", "Alive": True},
    {"NodeID": "c" * 56, "NodeManagerAddress": "10.0.0.3", "RayletSocketName": "raylet", "Alive": False},
]
_KEEPERS = [keeper_of(str(node["NodeID"])) for node in _JOINED]


def joined_node() -> ClusterState:
    record = ProcessRecord(name="ray", pid=1, started_at=0.0, url="10.0.0.1:6379", log="/ray", command=())
    head = "10.0.0.1:6379"
    return cluster_state(ray_address=head, node_ip="10.0.0.2", processes=[record], options={"address": head})


def test_node_is_waited_for_until_its_services_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = iter([[], _KEEPERS[:1], _KEEPERS[:2]])
    monkeypatch.setattr(keeper_client, "_NODES_POLL_S", 0.0)
    monkeypatch.setattr("ray.nodes", lambda: _JOINED)
    monkeypatch.setattr(keeper_client, "list_named_actors", lambda: next(kept))
    await_nodes(2, 60.0)
    said = capsys.readouterr().out
    assert said == "Node 10.0.0.1 is ready (1 of 2).\n2 nodes are ready: 10.0.0.1, 10.0.0.2.\n"


def test_nodes_that_joined_and_are_not_ready_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: _JOINED)
    monkeypatch.setattr(keeper_client, "list_named_actors", lambda: [_KEEPERS[0], _KEEPERS[2], "sluice-fleet"])
    with pytest.raises(NeighbourError, match=r"1 of 3 were ready within 0 s: 10\.0\.0\.1; 10\.0\.0\.2 joined, and"):
        await_nodes(3, 0.0)


def test_fleet_that_does_not_answer_is_a_row_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(_: float) -> list[dict[str, Any]]:
        raise OperatorError("The fleet did not answer within 10 s.")

    monkeypatch.setattr(tables, "is_ray_healthy", lambda _: True)
    monkeypatch.setattr(tables, "ray_connection", lambda _: nullcontext())
    monkeypatch.setattr(fleet_client, "describe_servers", silent)
    monkeypatch.setattr(keeper_client, "describe_services", lambda _: {})
    assert tables.show_cluster(joined_node(), Home(tmp_path)) == ["sluice-fleet"]
    assert "no answer within 10 s" in capsys.readouterr().out
    tables.show_cluster(joined_node(), Home(tmp_path), as_json=True)
    rows = {row["name"]: row["state"] for row in json.loads(capsys.readouterr().out)["processes"]}
    assert rows["sluice-fleet"] == "no answer within 10 s"
