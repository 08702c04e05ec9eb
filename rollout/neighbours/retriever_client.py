"""Passages for a query, from the node's own retriever, or another one while that is down.

Another one whose index has other content is not asked again: what the policy reads does not depend on what is down.
A failure raises NeighbourError("retriever"): its text never becomes an observation.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from protocol.errors import NeighbourError, OperatorError
from protocol.http.bodies import Passage, read_passages
from rollout.neighbours.batcher import Batcher, apart_if_refused
from rollout.neighbours.http.circuit_breaker import BreakerOpen, first_ready
from rollout.neighbours.http.endpoint import EndpointStats, HttpEndpoint, paused_deadline
from rollout.neighbours.http.retries import AttemptFailed, HttpPolicy, called
from rollout.neighbours.sources import note_source

__all__ = ["Passage", "RetrieverClient"]

_BOUNDARY = "retriever"
_MAX_CONCURRENCY = 256

_log = logging.getLogger(__name__)
_Found = tuple[Sequence[Passage], HttpEndpoint, str]  # a query's passages, who found them, in an index of which digest
_Answer = tuple[Sequence[Sequence[Passage]], HttpEndpoint, str]  # those of several queries


class RetrieverClient:
    """Searches; an async context manager, of one event loop.

    urls: addresses of POST /retrieve as given, the node's own first. topk: most passages of one search.
    default_token: bearer token sent to every url; give it only for this cluster's own retrievers.
    batch_size: most queries of one request, which takes those that are asked within a moment.
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
        self._unlike: set[str] = set()  # urls of those that hold another index than the own one
        self._batcher = Batcher[str, _Found](batch_size, lambda queries: apart_if_refused(queries, self._search))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._batcher.close()
        for retriever in self._retrievers:
            await retriever.close()

    @property
    def is_accepting(self) -> bool:
        """False while every retriever's breaker is open."""
        return any(not retriever.breaker.is_open for retriever in self._usable)

    @property
    def stats(self) -> dict[str, EndpointStats]:
        """Attempts (calls), failed attempts and retries since start, by url."""
        return {retriever.url: retriever.stats for retriever in self._retrievers}

    @property
    def content_hash(self) -> str:
        """Digest of what the first retriever searched last; "" before that, and of one that tells none."""
        return self._own.content_hash

    async def search(self, query: str) -> list[Passage]:
        """Return at most topk passages, best first; none found is an empty list.

        Raises: NeighbourError("retriever") when no retriever gave a valid answer within the policy.
        """
        passages, retriever, content_hash = await self._batcher.add(query)
        note_source(content_hash, retriever is not self._own if self._has_others else None)
        return list(passages[: self._topk])

    async def check(self) -> None:
        """Search once at the first retriever, without retries; for start-up.

        Raises: NeighbourError saying what to change.
        """
        body = _body_of(["check"], 1)
        try:
            await self._own.attempt(body, lambda reply: read_passages(reply, 1))
        except AttemptFailed as failure:
            advice = "Start it with deploy/start_cluster.sh, or change retriever.url."
            raise NeighbourError(_BOUNDARY, f"{failure}. {advice}") from failure

    async def _search(self, queries: Sequence[str]) -> list[_Found]:
        """Return what each query found; the same query is asked once. Raises: NeighbourError as `search` does."""
        asked = list(dict.fromkeys(queries))
        body = _body_of(asked, self._topk)
        missing = f"{', '.join(retriever.url for retriever in self._retrievers)}: no answer"
        found, retriever, content_hash = await called(
            _BOUNDARY,
            self._policy,
            lambda limit: self._ask_in_turn(body, len(asked), limit),
            self._count_retry,
            missing,
        )
        passages = dict(zip(asked, found, strict=True))
        return [(passages[query], retriever, content_hash) for query in queries]

    async def _ask_in_turn(self, body: bytes, num_queries: int, limit: asyncio.Timeout) -> _Answer:
        """Return the first valid answer, of the node's own retriever if it gives one.

        Those whose breaker is open are passed over. When all are, it waits for the first that may be tried.
        """
        while True:
            failure: AttemptFailed | None = None
            for retriever in self._usable:
                try:
                    answer = await self._ask(retriever, body, num_queries, limit)
                except BreakerOpen:
                    continue
                except AttemptFailed as error:
                    if error.max_attempts == 1:  # what one refuses, another would too
                        raise
                    # The own one's failure says what is wrong; another's only that it is no help.
                    failure = failure or error
                    continue
                if self._is_alike(retriever, answer[2]):
                    return answer
            if failure is not None:
                raise failure
            with paused_deadline(limit):
                await first_ready([retriever.breaker for retriever in self._usable])

    @property
    def _usable(self) -> list[HttpEndpoint]:
        return [retriever for retriever in self._retrievers if retriever.url not in self._unlike]

    def _is_alike(self, retriever: HttpEndpoint, content_hash: str) -> bool:
        """Return whether an answer may stand for the own retriever's; one that may not is the last of its service.

        Where the own one tells what it searched, one that does not tell may have searched anything.
        """
        own = self._own.content_hash
        if retriever is self._own or not own or content_hash == own:
            return True
        self._unlike.add(retriever.url)
        _log.warning(
            '%s holds another index  its="%s" own="%s" consequence="it is not asked while the own one is down"',
            retriever.url,
            content_hash[:12],
            own[:12],
        )
        return False

    async def _ask(self, retriever: HttpEndpoint, body: bytes, num_queries: int, limit: asyncio.Timeout) -> _Answer:
        try:
            found = await retriever.attempt(
                body, lambda reply: read_passages(reply, num_queries), limit=limit, waits=False
            )
        except AttemptFailed:
            retriever.stats.calls += 1
            retriever.stats.failures += 1
            raise
        retriever.stats.calls += 1
        return found, retriever, retriever.content_hash

    def _count_retry(self) -> None:
        self._retrievers[-1].stats.retries += 1


def _body_of(queries: Sequence[str], topk: int) -> bytes:
    return json.dumps({"queries": queries, "topk": topk, "return_scores": True}).encode()
