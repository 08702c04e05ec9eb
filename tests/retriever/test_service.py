"""The /retrieve contract over real HTTP."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from retriever.corpus import Corpus
from retriever.indexes.bm25 import Bm25Index
from retriever.indexes.index import Hit
from retriever.service import Limits, RetrieverService
from tests.fakes.http_servers import serving

CORPUS = Corpus(
    ["10", "11", "12"],
    ['"Oslo"\nOslo is a capital.', '"Bergen"\nBergen is a town.', '"Turku"\nTurku is a town.'],
    digest="d1",
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(RetrieverService(Bm25Index.build(CORPUS), CORPUS, "towns", Limits(topk=1)).app()) as address:
        yield address


@pytest.fixture
def http(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, trust_env=False) as client:
        yield client


def retrieve(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/retrieve", json=body)
    assert answer.status_code == 200
    return answer.json()["result"]


def test_retrieve_gives_documents_with_scores_when_asked(http: httpx.Client) -> None:
    (items,) = retrieve(http, queries=["bergen"], return_scores=True)
    assert [item["document"] for item in items] == [{"id": "11", "contents": '"Bergen"\nBergen is a town.'}]
    assert items[0]["score"] > 0


def test_retrieve_gives_documents_alone_by_default(http: httpx.Client) -> None:
    assert retrieve(http, queries=["oslo"]) == [[{"id": "10", "contents": '"Oslo"\nOslo is a capital.'}]]


def test_retrieve_uses_the_services_topk_when_none_is_asked_for(http: httpx.Client) -> None:
    assert [len(items) for items in retrieve(http, queries=["town"], topk=None)] == [1]
    assert [len(items) for items in retrieve(http, queries=["town"], topk=3)] == [2]


def test_reply_has_the_content_hash() -> None:
    service = RetrieverService(Bm25Index.build(CORPUS), CORPUS, "towns", content_hash="3fa9c1")
    with serving(service.app()) as address:
        answer = httpx.post(f"{address}/retrieve", json={"queries": ["oslo"]}, trust_env=False)
    assert answer.headers["x-content-hash"] == "3fa9c1"


def test_retrieve_of_no_queries_gives_no_results(http: httpx.Client) -> None:
    assert retrieve(http, queries=[]) == []


def test_retrieve_answers_queries_in_their_order(http: httpx.Client) -> None:
    found = retrieve(http, queries=["turku", "zebra", "oslo"])
    assert [[document["id"] for document in items] for items in found] == [["12"], [], ["10"]]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"queries": ["a", 3]}', "$.queries[1]"),
        (b'{"queries": ["a"], "topk": 0}', "$.topk"),
        (b"{}", "$.queries"),
        (b"{nonsense", "$"),
        (b'{"queries": ["\\ud800"]}', "$"),
        (b'{"queries": ' + b"[" * 5000, "$"),
        (b'{"queries": ["a"], "topk": 1001}', "$.topk"),
        (b'{"queries": [' + b'"a",' * 50_000 + b'"a"]}', "$.queries"),
        (b'{"queries": [' + b'"a",' * 50 + b'"a"], "topk": 1000}', "$.queries"),
    ],
)
def test_retrieve_names_the_wrong_field(http: httpx.Client, body: bytes, path: str) -> None:
    answer = http.post("/retrieve", content=body)
    assert (answer.status_code, answer.json()["path"]) == (422, path)


def test_retrieve_answers_as_many_passages_as_a_request_may_ask_for(http: httpx.Client) -> None:
    found = retrieve(http, queries=["oslo", "zebra"] * 25, topk=1000)
    assert [len(items) for items in found] == [1, 0] * 25


def _answer_without_body(address: str) -> bytes:
    """Return the beginning of the answer to a request whose body is never sent whole."""
    where = urlsplit(address)
    with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
        connection.sendall(b'POST /retrieve HTTP/1.1\r\nhost: a\r\ncontent-length: 20\r\n\r\n{"que')
        return connection.recv(13)


def test_body_that_is_never_sent_whole_is_answered_408() -> None:
    service = RetrieverService(Bm25Index.build(CORPUS), CORPUS, "towns", Limits(body_s=0.2))
    with serving(service.app()) as address:
        assert _answer_without_body(address) == b"HTTP/1.1 408 "


def test_openapi_shows_the_body(http: httpx.Client) -> None:
    route = http.get("/openapi.json").json()["paths"]["/retrieve"]["post"]
    shown = route["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert set(shown) == {"queries", "topk", "return_scores"}


def test_health_says_what_is_served(http: httpx.Client) -> None:
    assert http.get("/health").json() == {
        "status": "ok",
        "index": "towns",
        "backend": "bm25",
        "num_documents": 3,
        "corpus_digest": "d1",
        "content_hash": "",
    }


def test_metrics_count_queries(http: httpx.Client) -> None:
    def count() -> float:
        lines = http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("sluice_retriever_queries_total ")).split()[1])

    before = count()
    retrieve(http, queries=["a", "b"])
    assert count() == before + 2


class SlowIndex(Bm25Index):
    """An index whose searches wait for a permission."""

    def __init__(self) -> None:
        self.may_finish = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        assert self.loop is not None
        asyncio.run_coroutine_threadsafe(self.may_finish.wait(), self.loop).result(30)
        return [[] for _ in queries]


async def test_retrieve_refuses_more_than_its_queue_holds_while_health_answers() -> None:
    index = SlowIndex()
    index.loop = asyncio.get_running_loop()
    service = RetrieverService(index, CORPUS, "slow", Limits(max_waiting=2))
    with serving(service.app()) as address:
        async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=10) as http:
            accepted = [asyncio.create_task(http.post("/retrieve", json={"queries": ["a"]})) for _ in range(2)]
            while "sluice_retriever_waiting 2.0" not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.01)
            refused = await http.post("/retrieve", json={"queries": ["a"]})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert await asyncio.to_thread(_answer_without_body, address) == b"HTTP/1.1 503 "
            assert (await http.get("/health")).status_code == 200
            index.may_finish.set()
            assert [(await answer).json() for answer in accepted] == [{"result": [[]]}, {"result": [[]]}]
