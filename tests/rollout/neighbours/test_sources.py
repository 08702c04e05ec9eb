"""A trajectory carries the content hashes of the indexes that answered its own searches."""

import asyncio
from typing import Any

import pytest

from protocol.wire.trajectory import Trajectory
from rollout.environments.base import Resources
from rollout.environments.search import Search
from rollout.neighbours.retriever_client import RetrieverClient, add_source, record_sources
from tests.fakes.engines import ScriptedEngine
from tests.fakes.http_servers import Answer, ScriptedServer
from tests.fakes.playing_session import playing_session

FOUND = {"result": [[{"document": {"id": "1", "contents": "Minsk"}, "score": 1.0}]]}


async def played(server: ScriptedServer, headers: dict[str, str], *nodes_before: Answer) -> Trajectory:
    """Return a trajectory of one search, by a retriever that answers with these headers.

    nodes_before: answers of the retrievers with a higher priority.
    """
    urls = [server.script(f"node{place}", answer) for place, answer in enumerate(nodes_before)]
    urls.append(server.script("retrieve", Answer(FOUND, headers=headers)))

    def write(context: str) -> str:
        return "<answer>Minsk</answer>" if "Minsk" in context else "<search>capital</search>"

    async with RetrieverClient(urls, topk=1) as client:

        async def search(query: str) -> list[str]:
            return [passage.contents for passage in await client.search(query)]

        resources = Resources(3, {"search": search})
        async with playing_session(ScriptedEngine(write), Search, resources) as playing:
            made: Any = await playing.made("e0-a")
    assert isinstance(made, Trajectory), made
    return made


async def test_trajectory_carries_the_content_hash_of_the_index_that_answered(server: ScriptedServer) -> None:
    assert (await played(server, {"x-content-hash": "3fa9c1"})).facts.content_hashes == ["3fa9c1"]


async def test_share_of_searches_on_another_node_is_logged_if_there_is_one(server: ScriptedServer) -> None:
    assert (await played(server, {})).facts.reward_logs == {"environment/cut_replies": 0.0}
    elsewhere = await played(server, {}, Answer("down", 502))
    assert elsewhere.facts.reward_logs["environment/searched_elsewhere"] == 1.0
    at_home = await played(server, {}, Answer(FOUND))
    assert at_home.facts.reward_logs["environment/searched_elsewhere"] == 0.0


@pytest.mark.parametrize("headers", [{}, {"x-content-hash": "a" * 500}, {"x-content-hash": "<b>"}])
async def test_missing_or_invalid_content_hash_is_not_recorded(server: ScriptedServer, headers: dict[str, str]) -> None:
    assert (await played(server, headers)).facts.content_hashes == []


async def test_concurrent_samples_record_their_own_sources() -> None:
    async def sample(digest: str) -> set[str]:
        with record_sources() as sources:
            await asyncio.create_task(asyncio.sleep(0.01))
            await asyncio.create_task(_add_later(digest))
        return sources.content_hashes

    assert await asyncio.gather(sample("a"), sample("b")) == [{"a"}, {"b"}]


async def _add_later(digest: str) -> None:
    add_source(digest)
