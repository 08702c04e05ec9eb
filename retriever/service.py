"""The FastAPI app of the retriever: POST /retrieve, GET /health, GET /metrics."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protocol.http.app import body_schema, make_app, typed_body
from protocol.http.bodies import CONTENT_HASH, BodyError, RetrieveRequest
from retriever.corpus import Corpus
from retriever.indexes.index import Hit, Index
from retriever.searcher import Searcher

MAX_REQUEST_BYTES = 16 << 20
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True)
class Limits:
    """Limits of the service."""

    topk: int = 3  # passages when a request names no topk
    num_threads: int = 1
    max_waiting: int = 512  # requests in flight before 503
    cache_size: int = 10_000  # queries in the cache; 0: no cache
    retry_after_s: int = 1  # Retry-After of a 503
    max_passages: int = 50_000  # queries times topk of one request: the reply is built in memory
    body_s: float = 30.0  # time limit for receiving a body; then 408


class RetrieverService:
    """Serves searches of one index. Searches run on their own threads, so /health answers under load."""

    def __init__(
        self,
        index: Index,
        corpus: Corpus,
        name: str,
        limits: Limits | None = None,
        backend: str = "bm25",
        content_hash: str = "",
    ) -> None:
        """content_hash: equal for services with equal answers."""
        self._limits = limits or Limits()
        self._searcher = Searcher(index, self._limits.num_threads, self._limits.cache_size)
        self._corpus = corpus
        self._name = name
        self._backend = backend
        self._content_hash = content_hash
        self._metrics = _Metrics()
        self._num_running = 0
        self._metrics.waiting.set_function(lambda: self._num_running)

    def app(self) -> FastAPI:
        """Return the application; one per service."""
        app = make_app(f"Retriever: {self._name}", self._metrics.registry, self._metrics.requests)
        app.get("/health")(self._health)
        read = typed_body(RetrieveRequest, MAX_REQUEST_BYTES, self._limits.body_s)

        not_full = Depends(self._refuse_when_full)  # before the body is read

        @app.post("/retrieve", dependencies=[not_full], openapi_extra=body_schema(RetrieveRequest))
        async def retrieve(body: Annotated[RetrieveRequest, Depends(read)]) -> Response:
            """Find the passages of each query, best first."""
            return JSONResponse({"result": await self._retrieve(body)}, headers={CONTENT_HASH: self._content_hash})

        return app

    async def _refuse_when_full(self) -> None:
        if self._num_running >= self._limits.max_waiting:
            detail = "too many searches are waiting; come back later"
            raise HTTPException(503, detail, {"retry-after": str(self._limits.retry_after_s)})

    async def _retrieve(self, request: RetrieveRequest) -> list[list[dict[str, Any]]]:
        topk = request.topk or self._limits.topk
        if len(request.queries) * topk > self._limits.max_passages:
            problem = f"has {len(request.queries)} entries, which times topk {topk} is over {self._limits.max_passages}"
            raise BodyError("$.queries", problem)
        started = time.perf_counter()
        self._num_running += 1
        try:
            found = await self._searcher.search(request.queries, topk)
        finally:
            self._num_running -= 1
        self._metrics.queries.inc(len(request.queries))
        self._metrics.seconds.observe(time.perf_counter() - started)
        self._metrics.cached.set(self._searcher.num_cached)
        return [self._items(hits, request.return_scores) for hits in found]

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


class _Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sluice_retriever_requests", "Requests by HTTP status.", ["status"], registry=self.registry
        )
        self.queries = Counter("sluice_retriever_queries", "Queries searched.", registry=self.registry)
        self.cached = Gauge("sluice_retriever_cached_queries", "Queries found in the cache.", registry=self.registry)
        self.waiting = Gauge("sluice_retriever_waiting", "Requests waiting or searched now.", registry=self.registry)
        self.seconds = Histogram(
            "sluice_retriever_request_seconds", "Waiting and searching.", buckets=_BUCKETS_S, registry=self.registry
        )
