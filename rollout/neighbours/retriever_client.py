"""Passages for a query, from the node's own retriever, or from another node's while that one is down.

A retriever with another index is not used again: observations must not depend on outages.
A failure raises NeighbourError("retriever"): its text never becomes an observation.
"""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from protocol.errors import NeighbourError, OperatorError
from protocol.http.bodies import Passage, read_passages
from rollout.neighbours.batcher import Batcher, split_if_refused
from rollout.neighbours.http.circuit_breaker import BreakerOpen, first_ready
from rollout.neighbours.http.endpoint import HttpEndpoint, HttpPolicy, call_with_retries, paused_deadline
from rollout.neighbours.http.failures import AttemptFailed, FailureKind
from rollout.neighbours.http.pool import ClosedAtExit

_BOUNDARY = "retriever"
_MAX_CONCURRENCY = 256

_log = logging.getLogger(__name__)
_Result = tuple[Sequence[Passage], HttpEndpoint, str]  # passages of one query, retriever, content hash of its index
_Answer = tuple[Sequence[Sequence[Passage]], HttpEndpoint, str]  # the same for several queries


class RetrieverClient(ClosedAtExit):
    """Searches with retries. Belongs to one event loop.

    urls: addresses of POST /retrieve, the node's own first. topk: most passages per search.
    default_token: bearer token for all urls; only for this cluster's retrievers.
    batch_size: most queries per request; simultaneous searches share one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        topk: int,
        default_token: str | None = None,
        policy: HttpPolicy | None = None,
        batch_size: int = 1,
    ) -> None:
        if not urls:
            raise OperatorError("settings: no retriever. Set retriever.url, or start the cluster with its retriever.")
        self._policy = policy or HttpPolicy(attempt_timeout_s=30.0)
        self._topk = topk
        headers = {"authorization": f"Bearer {default_token}"} if default_token else {}
        self._retrievers = [HttpEndpoint(url, headers, self._policy, _MAX_CONCURRENCY) for url in urls]
        self._own, self._has_others = self._retrievers[0], len(urls) > 1
        self._urls_with_other_index: set[str] = set()  # urls of retrievers with another index than the own one
        self._batcher = Batcher[str, _Result](batch_size, lambda queries: split_if_refused(queries, self._search))

    async def close(self) -> None:
        await self._batcher.close()
        for retriever in self._retrievers:
            await retriever.close()

    @property
    def is_accepting(self) -> bool:
        """False while every retriever's breaker is open."""
        return any(not retriever.breaker.is_open for retriever in self._usable)

    @property
    def content_hash(self) -> str:
        """Content hash in the own retriever's last answer; "" if unknown."""
        return self._own.content_hash

    async def search(self, query: str) -> list[Passage]:
        """Return at most topk passages, best first.

        Raises: NeighbourError("retriever") without a valid answer within the policy.
        """
        passages, retriever, content_hash = await self._batcher.add(query)
        add_source(content_hash, retriever is not self._own if self._has_others else None)
        return list(passages[: self._topk])

    async def check(self) -> None:
        """Search once at the own retriever without retries, at start-up. Raises: NeighbourError with the remedy."""
        body = _body_of(["check"], 1)
        try:
            await self._own.attempt(body, lambda reply: read_passages(reply, 1))
        except AttemptFailed as failure:
            advice = "Start it with sluice start, or change retriever.url."
            raise NeighbourError(_BOUNDARY, f"{failure}. {advice}") from failure

    async def _search(self, queries: Sequence[str]) -> list[_Result]:
        """Return the result of each query, sending equal queries once. Raises: NeighbourError as `search` does."""
        distinct = list(dict.fromkeys(queries))
        body = _body_of(distinct, self._topk)
        timeout_text = f"{', '.join(retriever.url for retriever in self._retrievers)}: no answer"
        found, retriever, content_hash = await call_with_retries(
            _BOUNDARY,
            self._policy,
            lambda limit: self._first_answer(body, len(distinct), limit),
            timeout_text,
        )
        passages = dict(zip(distinct, found, strict=True))
        return [(passages[query], retriever, content_hash) for query in queries]

    async def _first_answer(self, body: bytes, num_queries: int, limit: asyncio.Timeout) -> _Answer:
        """Return the first valid answer; the own retriever is tried first.

        Retrievers with an open breaker are skipped. If all are open, it waits for the first trial.
        """
        while True:
            failure: AttemptFailed | None = None
            for retriever in self._usable:
                try:
                    found = await retriever.attempt(
                        body, lambda reply: read_passages(reply, num_queries), limit=limit, waits=False
                    )
                except BreakerOpen:
                    continue
                except AttemptFailed as error:
                    if error.kind in (FailureKind.REFUSED, FailureKind.WRONG):  # another retriever would refuse it too
                        raise
                    # Report the failure of the own retriever.
                    failure = failure or error
                    continue
                content_hash = retriever.content_hash
                if self._has_same_index(retriever, content_hash):
                    return found, retriever, content_hash
                self._exclude(retriever, content_hash)
            if failure is not None:
                raise failure
            with paused_deadline(limit):
                await first_ready([retriever.breaker for retriever in self._usable])

    @property
    def _usable(self) -> list[HttpEndpoint]:
        return [retriever for retriever in self._retrievers if retriever.url not in self._urls_with_other_index]

    def _has_same_index(self, retriever: HttpEndpoint, content_hash: str) -> bool:
        """Return whether an answer may replace the own retriever's.

        An answer without a hash may not, unless the own hash is unknown too.
        """
        own = self._own.content_hash
        return retriever is self._own or not own or content_hash == own

    def _exclude(self, retriever: HttpEndpoint, content_hash: str) -> None:
        """Never use this retriever again: its index differs from the own one."""
        self._urls_with_other_index.add(retriever.url)
        _log.warning(
            '%s has another index  its="%s" own="%s" consequence="it does not replace the own one"',
            retriever.url,
            content_hash[:12],
            self._own.content_hash[:12],
        )


def _body_of(queries: Sequence[str], topk: int) -> bytes:
    return json.dumps({"queries": queries, "topk": topk, "return_scores": True}).encode()


# -- which retrievers answered a sample's searches: recorded here, read by the sample's player -------------------------


@dataclass
class Sources:
    """The retrievers that answered one sample's searches."""

    content_hashes: set[str] = field(default_factory=set)  # content hashes of the indexes, where known
    num_with_fallback: int = 0  # searches for which another node's retriever was configured
    num_elsewhere: int = 0  # searches that another node's retriever answered


# A task inherits the sources of its parent task: the same object.
_sources: ContextVar[Sources | None] = ContextVar("sources", default=None)


@contextmanager
def record_sources() -> Iterator[Sources]:
    """Yield the record of all searches within the block, including its child tasks."""
    sources = Sources()
    token = _sources.set(sources)
    try:
        yield sources
    finally:
        _sources.reset(token)


def add_source(content_hash: str, is_elsewhere: bool | None = None) -> None:
    """Record an answered search.

    content_hash: of the index; "" if unknown.
    is_elsewhere: whether another node answered; None: no other retriever is configured.
    """
    sources = _sources.get()
    if sources is None:
        return
    sources.num_with_fallback += is_elsewhere is not None
    sources.num_elsewhere += bool(is_elsewhere)
    if content_hash:
        sources.content_hashes.add(content_hash)
