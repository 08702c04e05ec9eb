"""The ASGI application of the retriever: POST /retrieve, GET /health, GET /metrics."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protocol.http.bodies import BodyError, RetrieveRequest, read_request
from protocol.http.body_limit import BodyTooLargeError, read_body
from retriever.corpus import Corpus
from retriever.indexes.index import Hit, Index

MAX_REQUEST_BYTES = 16 << 20
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True)
class Limits:
    """How much the service takes on."""

    topk: int = 3  # passages when a request names no topk
    num_threads: int = 1  # that search
    max_waiting: int = 512  # requests in flight before 503
    retry_after_s: int = 1  # what a 503 advises
    max_passages: int = 50_000  # queries times topk of one request: its reply is made in memory
    body_s: float = 30.0  # a request that has not been sent whole by then is answered 408


class RetrieverService:
    """Answers searches of one index. Searching runs on its own threads, so that /health answers under load."""

    def __init__(
        self, index: Index, corpus: Corpus, name: str, limits: Limits | None = None, backend: str = "bm25"
    ) -> None:
        self._index = index
        self._corpus = corpus
        self._name = name
        self._backend = backend
        self._limits = limits or Limits()
        self._threads = ThreadPoolExecutor(self._limits.num_threads, thread_name_prefix="search")
        self._metrics = _Metrics()
        self._num_waiting = 0

    def app(self) -> Starlette:
        """Return the application; one per service."""
        return Starlette(
            routes=[
                Route("/retrieve", self._retrieve, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._show_metrics),
            ]
        )

    async def _retrieve(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(self._limits.body_s):
                body = await read_body(request.stream(), request.headers.get("content-length"), MAX_REQUEST_BYTES)
            asked = read_request(RetrieveRequest, body)
        except ClientDisconnect:
            return self._answer(499, {"detail": "the client left"})  # nobody hears it; it is counted
        except TimeoutError:
            return self._answer(408, {"detail": f"the body was not sent within {self._limits.body_s:g} s"})
        except BodyTooLargeError as error:
            return self._answer(413, {"detail": str(error)})
        except BodyError as error:
            return self._answer(422, {"detail": str(error), "path": error.path})
        topk = asked.topk or self._limits.topk
        if len(asked.queries) * topk > self._limits.max_passages:
            detail = f"$.queries has {len(asked.queries)} entries, which times topk {topk} is over "
            return self._answer(422, {"detail": f"{detail}{self._limits.max_passages}", "path": "$.queries"})
        if self._num_waiting >= self._limits.max_waiting:
            busy = self._answer(503, {"detail": f"{self._num_waiting} searches are waiting; come back later"})
            busy.headers["retry-after"] = str(self._limits.retry_after_s)
            return busy
        self._num_waiting += 1
        self._metrics.waiting.set(self._num_waiting)
        started = time.perf_counter()
        try:
            # The seam for searching several requests at once (dense encoders): this call is the only way in.
            found = await asyncio.get_running_loop().run_in_executor(self._threads, self._search, asked, topk)
        finally:
            self._num_waiting -= 1
            self._metrics.waiting.set(self._num_waiting)
        self._metrics.queries.inc(len(asked.queries))
        self._metrics.seconds.observe(time.perf_counter() - started)
        return self._answer(200, {"result": found})

    def _search(self, asked: RetrieveRequest, topk: int) -> list[list[dict[str, Any]]]:
        return [self._items(hits, asked.return_scores) for hits in self._index.search(asked.queries, topk)]

    def _items(self, hits: Sequence[Hit], with_scores: bool) -> list[dict[str, Any]]:
        documents = [{"id": self._corpus.ids[hit.row], "contents": self._corpus.contents[hit.row]} for hit in hits]
        if not with_scores:
            return documents
        return [{"document": document, "score": hit.score} for document, hit in zip(documents, hits, strict=True)]

    def _answer(self, status: int, body: dict[str, Any]) -> Response:
        self._metrics.requests.labels(str(status)).inc()
        return JSONResponse(body, status)

    async def _health(self, request: Request) -> Response:
        return JSONResponse(
            {
                "status": "ok",
                "index": self._name,
                "backend": self._backend,
                "num_documents": len(self._corpus),
                "corpus_digest": self._corpus.digest,
            }
        )

    async def _show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)


class _Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sluice_retriever_requests", "Requests by HTTP status.", ["status"], registry=self.registry
        )
        self.queries = Counter("sluice_retriever_queries", "Queries searched.", registry=self.registry)
        self.waiting = Gauge("sluice_retriever_waiting", "Requests waiting or searched now.", registry=self.registry)
        self.seconds = Histogram(
            "sluice_retriever_request_seconds", "Waiting and searching.", buckets=_BUCKETS_S, registry=self.registry
        )
