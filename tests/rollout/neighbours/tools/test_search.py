"""The search tool asks its node's own retriever, and the next node's while that is down."""

from collections.abc import Iterator

import pytest

from learner.cluster.servers import shared_retrievers
from rollout.neighbours.node import Node
from rollout.neighbours.tools.search import SearchTool
from tests.fakes.http_servers import Answer, ScriptedServer, scripted_server
from tests.fakes.rollout_fakes import make_keys, make_spec


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        for name in ("a", "b", "c"):
            scripted.script(name, Answer({"result": [[name]]}))
        yield scripted


@pytest.mark.parametrize(("own", "next_node"), [("a", "b"), ("b", "c"), ("c", "a")])
async def test_while_the_own_retriever_is_down_the_next_nodes_is_asked(
    server: ScriptedServer, own: str, next_node: str
) -> None:
    infos = [{"shared_retriever_url": f"{server.address}/{name}"} for name in ("c", "a", "b", "a")]
    spec = make_spec().model_copy(update={"shared_retrievers": shared_retrievers(infos)})
    down = server.script("down", Answer("down", 502))
    node = Node(None, down, "token-of-the-cluster", make_keys(), shared_retriever_url=f"{server.address}/{own}")
    tool = SearchTool(spec, node)
    try:
        assert await tool("q") == [next_node]
    finally:
        await tool.close()
    assert server.received[own] == []
    asked = server.received[next_node][0].headers
    assert asked["authorization"] == "Bearer token-of-the-cluster"


async def test_a_node_that_shares_nothing_asks_the_others_too(server: ScriptedServer) -> None:
    spec = make_spec().model_copy(update={"shared_retrievers": (f"{server.address}/a",)})
    tool = SearchTool(spec, Node(None, server.script("down", Answer("down", 502)), "token", make_keys()))
    try:
        assert await tool("q") == ["a"]
    finally:
        await tool.close()


def test_servers_of_nodes_that_share_nothing_name_no_address() -> None:
    assert shared_retrievers([{"shared_retriever_url": None}, {"shared_retriever_url": None}]) == ()
