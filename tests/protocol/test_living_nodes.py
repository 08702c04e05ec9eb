"""A node that comes back is one node, also while Ray takes its former processes for alive."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.ray_calls import living_nodes


def node(name: str, port: int = 0, raylet: str = "raylet", *, is_alive: bool = True) -> dict[str, Any]:
    where = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port, "RayletSocketName": raylet}
    return {"NodeID": name, "Alive": is_alive, **where}


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found: int = server.getsockname()[1]
    return found


def names(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any]) -> list[str]:
    monkeypatch.setattr("ray.nodes", lambda: list(nodes))
    return [str(found["NodeID"]) for found in living_nodes()]


def test_nodes_of_one_machine_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(monkeypatch, node("a", raylet="1"), node("b", raylet="2"), node("c", is_alive=False)) == ["a", "b"]


def test_node_that_came_back_counts_and_its_former_self_does_not(
    monkeypatch: pytest.MonkeyPatch, port: int, closed_port: int
) -> None:
    assert names(monkeypatch, node("new", port), node("old", closed_port)) == ["new"]
    assert names(monkeypatch, node("old", closed_port), node("new", port)) == ["new"]


def test_where_it_cannot_be_told_neither_counts_until_ray_has_noticed(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    assert names(monkeypatch, node("old", port), node("new", port), node("other", raylet="2")) == ["other"]
    assert names(monkeypatch, node("old", port, is_alive=False), node("new", port)) == ["new"]
