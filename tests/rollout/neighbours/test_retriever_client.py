"""The retriever client against the real service and against misbehaving ones."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from protocol.errors import NeighbourError, OperatorError
from protocol.http.bearer import BearerGate
from protocol.http.bodies import Passage
from retriever.corpus import Corpus
from retriever.indexes.bm25 import Bm25Index
from retriever.service import RetrieverService
from rollout.neighbours.http.endpoint import HttpPolicy
from rollout.neighbours.retriever_client import RetrieverClient, record_sources
from tests.fakes.http_servers import Answer, Received, ScriptedServer, counted_posts, free_address, serving

TOKEN = "a-token-of-the-cluster"
FAST = HttpPolicy(min_backoff_s=0.005, max_backoff_s=0.02, attempt_timeout_s=20.0, overall_timeout_s=60.0)
CORPUS = Corpus(["10", "11"], ['"Oslo"\nOslo is a capital.', '"Bergen"\nBergen is a town.'], digest="d")


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    app = BearerGate(RetrieverService(Bm25Index.build(CORPUS), CORPUS, "towns").app(), TOKEN)
    with serving(app) as address:
        yield f"{address}/retrieve"


async def test_search_finds_passages_of_the_real_service(real: str) -> None:
    async with RetrieverClient([real], topk=3, default_token=TOKEN) as client:
        await client.check()
        (passage,) = await client.search("Bergen")
        assert (passage.id, passage.contents) == ("11", '"Bergen"\nBergen is a town.')
        assert passage.score is not None
        assert passage.score > 0
        assert await client.search("zebra") == []


async def test_missing_token_is_reported(real: str) -> None:
    async with RetrieverClient([real], topk=3, policy=FAST) as client:
        with pytest.raises(NeighbourError, match=r"answered 401: .*asks for the cluster's token.* \(1 attempt in "):
            await client.search("Bergen")


async def test_search_cuts_to_topk(server: ScriptedServer) -> None:
    url = server.script("many", Answer({"result": [["a", "b", "c"]]}))
    async with RetrieverClient([url], topk=2, policy=FAST) as client:
        assert await client.search("q") == [Passage("", "a", None), Passage("", "b", None)]
    assert server.received["many"][0].body == {"queries": ["q"], "topk": 2, "return_scores": True}


async def test_simultaneous_searches_share_a_request(real: str) -> None:
    asked = ["Oslo", "Bergen", "zebra", "Oslo", "Bergen", "Oslo"]
    with counted_posts() as posts:
        async with RetrieverClient([real], topk=1, default_token=TOKEN, batch_size=8) as client:
            found = await asyncio.gather(*map(client.search, asked))
    ids = {"Oslo": ["10"], "Bergen": ["11"], "zebra": []}
    assert [[passage.id for passage in passages] for passages in found] == [ids[query] for query in asked]
    assert posts == {real: 1}


async def test_query_that_crashes_the_service_does_not_affect_its_batch(server: ScriptedServer) -> None:
    def answer(received: Received) -> Answer:
        queries = received.body["queries"]
        return Answer("bad", 500) if "bad" in queries else Answer({"result": [[query] for query in queries]})

    url = server.script_by("trips", answer)
    async with RetrieverClient([url], topk=1, policy=FAST, batch_size=4) as client:
        found = await asyncio.gather(*map(client.search, ["a", "bad", "b"]), return_exceptions=True)
    assert [found[0], found[2]] == [[Passage("", "a", None)], [Passage("", "b", None)]]
    assert isinstance(found[1], NeighbourError)


async def test_next_retriever_replaces_a_dead_one(real: str) -> None:
    down = f"{free_address()}/retrieve"
    policy = replace(FAST, breaker_threshold=3, breaker_after_s=0.0, breaker_cooldown_s=60.0)
    with counted_posts() as posts:
        async with RetrieverClient([down, real], topk=1, default_token=TOKEN, policy=policy) as client:
            for _ in range(10):
                assert [passage.id for passage in await client.search("Oslo")] == ["10"]
            assert client.is_accepting
    assert posts == {down: 3, real: 10}


@pytest.mark.parametrize(("headers", "its"), [({"x-content-hash": "b2"}, "b2"), ({}, "")])
async def test_retriever_with_another_index_is_not_used(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, headers: dict[str, str], its: str
) -> None:
    found = Answer({"result": [["own"]]}, headers={"x-content-hash": "a1"})
    own = server.script("own", found, Answer("down", 502), Answer("down", 502), found)
    unlike = server.script("unlike", Answer({"result": [["unlike"]]}, headers=headers))
    async with RetrieverClient([own, unlike], topk=1, policy=FAST) as client:
        assert [(await client.search("q"))[0].contents for _ in range(2)] == ["own", "own"]
    assert len(server.received["unlike"]) == 1
    assert f'{unlike} has another index  its="{its}" own="a1"' in caplog.text


async def test_retriever_with_the_same_index_replaces_the_own_one(server: ScriptedServer) -> None:
    own = server.script("own", Answer({"result": [["own"]]}, headers={"x-content-hash": "a1"}), Answer("down", 502))
    alike = server.script("alike", Answer({"result": [["alike"]]}, headers={"x-content-hash": "a1"}))
    async with RetrieverClient([own, alike], topk=1, policy=FAST) as client:
        with record_sources() as sources:
            assert [(await client.search("q"))[0].contents for _ in range(3)] == ["own", "alike", "alike"]
    assert (sources.content_hashes, sources.num_with_fallback, sources.num_elsewhere) == ({"a1"}, 3, 2)


async def test_refused_query_is_not_sent_to_another_node(server: ScriptedServer) -> None:
    own = server.script("own", Answer({"detail": "$.queries[0] is too long"}, 422))
    other = server.script("other", Answer({"result": [["other"]]}))
    async with RetrieverClient([own, other], topk=1, policy=FAST) as client:
        with pytest.raises(NeighbourError, match="is too long"):
            await client.search("q")
    assert server.received["other"] == []


async def test_check_says_what_to_change_when_nothing_listens() -> None:
    down = free_address()
    async with RetrieverClient([f"{down}/retrieve"], topk=1, policy=FAST) as client:
        with pytest.raises(NeighbourError) as error:
            await client.check()
    assert str(error.value).startswith(f"retriever: {down}/retrieve: no connection (Connect call failed (")
    assert str(error.value).endswith("). Start it with sluice start, or change retriever.url.")


def test_client_refuses_to_start_without_a_retriever() -> None:
    with pytest.raises(OperatorError, match="no retriever"):
        RetrieverClient([], topk=1)
