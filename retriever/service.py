"""The FastAPI app of the retriever: POST /retrieve, GET /health, GET /metrics."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protocol.http.app import App, Receive, Scope, Send, body_schema, make_app, typed_body
from protocol.http.bodies import CONTENT_HASH, BodyError, RetrieveRequest
from retriever.corpus import Corpus
from retriever.indexes.index import Hit, Index
from retriever.searcher import Searcher

MAX_REQUEST_BYTES = 16 << 20
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True)
class Limits:
    """How much the service takes on."""

    topk: int = 3  # passages when a request names no topk
    num_threads: int = 1  # that search
    max_waiting: int = 512  # requests in flight before 503
    max_wait_s: float = 0.5  # a search that would wait for longer is answered 503
    cache_size: int = 10_000  # queries whose hits are kept; 0: none
    retry_after_s: int = 1  # what a 503 advises
    max_passages: int = 50_000  # queries times topk of one request: its reply is made in memory
    body_s: float = 30.0  # a request that has not been sent whole by then is answered 408


class RetrieverService:
    """Answers searches of one index. Searching runs on its own threads, so that /health answers under load."""

    def __init__(
        self,
        index: Index,
        corpus: Corpus,
        name: str,
        limits: Limits | None = None,
        backend: str = "bm25",
        content_hash: str = "",
    ) -> None:
        """content_hash: says whether two services answer alike."""
        self._searcher = Searcher(index, (limits or Limits()).num_threads, (limits or Limits()).cache_size)
        self._corpus = corpus
        self._name = name
        self._backend = backend
        self._content_hash = content_hash
        self._limits = limits or Limits()
        self._metrics = _Metrics()
        self._num_waiting = 0

    def app(self) -> FastAPI:
        """Return the application; one per service."""
        app = make_app(f"Retriever: {self._name}", self._metrics.registry, self._metrics.requests)
        app.get("/health")(self._health)
        app.add_middleware(_TurnAway, is_full=self._is_full, retry_after_s=self._limits.retry_after_s)
        read = typed_body(RetrieveRequest, MAX_REQUEST_BYTES, self._limits.body_s)

        @app.post("/retrieve", openapi_extra=body_schema(RetrieveRequest))
        async def retrieve(asked: Annotated[RetrieveRequest, Depends(read)]) -> Response:
            """Find the passages of each query, best first."""
            return JSONResponse({"result": await self._retrieve(asked)}, headers={CONTENT_HASH: self._content_hash})

        return app

    def _is_full(self) -> bool:
        return self._num_waiting >= self._limits.max_waiting or self._searcher.wait_s > self._limits.max_wait_s

    async def _retrieve(self, asked: RetrieveRequest) -> list[list[dict[str, Any]]]:
        topk = asked.topk or self._limits.topk
        if len(asked.queries) * topk > self._limits.max_passages:
            problem = f"has {len(asked.queries)} entries, which times topk {topk} is over {self._limits.max_passages}"
            raise BodyError("$.queries", problem)
        self._num_waiting += 1
        self._metrics.waiting.set(self._num_waiting)
        started = time.perf_counter()
        try:
            found = await self._searcher.search(asked.queries, topk)
        finally:
            self._num_waiting -= 1
            self._metrics.waiting.set(self._num_waiting)
        self._metrics.queries.inc(len(asked.queries))
        self._metrics.seconds.observe(time.perf_counter() - started)
        self._metrics.cached.set(self._searcher.num_cached)
        return [self._items(hits, asked.return_scores) for hits in found]

    def _items(self, hits: Sequence[Hit], with_scores: bool) -> list[dict[str, Any]]:
        documents = [{"id": self._corpus.ids[hit.row], "contents": self._corpus.contents[hit.row]} for hit in hits]
        if not with_scores:
            return documents
        return [{"document": document, "score": hit.score} for document, hit in zip(documents, hits, strict=True)]

    async def _health(self) -> Response:
        return JSONResponse(
            {
                "status": "ok",
                "index": self._name,
                "backend": self._backend,
                "num_documents": len(self._corpus),
                "corpus_digest": self._corpus.digest,
                "content_hash": self._content_hash,
            }
        )


class _TurnAway:
    """ASGI middleware: 503 for a search while the service is full, before its body is read.

    What turns requests away must cost next to nothing, or the accepted ones wait for it.
    """

    def __init__(self, app: App, is_full: Callable[[], bool], retry_after_s: int) -> None:
        self._app = app
        self._is_full = is_full
        self._busy = JSONResponse(
            {"detail": "too many searches are waiting; come back later"}, 503, {"retry-after": str(retry_after_s)}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_search = scope["type"] == "http" and scope["path"] == "/retrieve"
        await (self._busy if is_search and self._is_full() else self._app)(scope, receive, send)


class _Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sluice_retriever_requests", "Requests by HTTP status.", ["status"], registry=self.registry
        )
        self.queries = Counter("sluice_retriever_queries", "Queries searched.", registry=self.registry)
        self.cached = Gauge("sluice_retriever_cached_queries", "Queries answered from memory.", registry=self.registry)
        self.waiting = Gauge("sluice_retriever_waiting", "Requests waiting or searched now.", registry=self.registry)
        self.seconds = Histogram(
            "sluice_retriever_request_seconds", "Waiting and searching.", buckets=_BUCKETS_S, registry=self.registry
        )
