"""Passages for a query, from the node's own retriever, or another one while that is down.

A failure raises NeighbourError("retriever"): its text never becomes an observation.
"""

import asyncio
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from protocol.errors import NeighbourError, OperatorError
from protocol.http.bodies import Passage, read_passages
from rollout.neighbours.http.circuit_breaker import BreakerOpen, first_ready
from rollout.neighbours.http.endpoint import EndpointStats, HttpEndpoint, paused_deadline
from rollout.neighbours.http.retries import AttemptFailed, HttpPolicy, called
from rollout.neighbours.sources import note_source

__all__ = ["Passage", "RetrieverClient"]

_BOUNDARY = "retriever"
_MAX_CONCURRENCY = 256


class RetrieverClient:
    """Searches; an async context manager, of one event loop.

    urls: addresses of POST /retrieve as given, the node's own first. topk: most passages of one search.
    default_token: bearer token sent to every url; give it only for this cluster's own retrievers.
    """

    def __init__(
        self, urls: Sequence[str], topk: int, default_token: str | None = None, policy: HttpPolicy | None = None
    ) -> None:
        if not urls:
            raise OperatorError("settings: no retriever. Set retriever.url, or start the cluster with its retriever.")
        self._policy = policy or HttpPolicy(attempt_timeout_s=30.0)
        self._topk = topk
        headers = {"authorization": f"Bearer {default_token}"} if default_token else {}
        self._retrievers = [HttpEndpoint(url, headers, self._policy, _MAX_CONCURRENCY) for url in urls]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        for retriever in self._retrievers:
            await retriever.close()

    @property
    def is_accepting(self) -> bool:
        """False while every retriever's breaker is open."""
        return any(not retriever.breaker.is_open for retriever in self._retrievers)

    @property
    def stats(self) -> dict[str, EndpointStats]:
        """Attempts (calls), failed attempts and retries since start, by url."""
        return {retriever.url: retriever.stats for retriever in self._retrievers}

    @property
    def content_hash(self) -> str:
        """Digest of what the first retriever searched last; "" before that, and of one that tells none."""
        return self._retrievers[0].content_hash

    async def search(self, query: str) -> list[Passage]:
        """Return at most topk passages, best first; none found is an empty list.

        Raises: NeighbourError("retriever") when no retriever gave a valid answer within the policy.
        """
        body = json.dumps({"queries": [query], "topk": self._topk, "return_scores": True}).encode()
        missing = f"{', '.join(retriever.url for retriever in self._retrievers)}: no answer"
        return await called(
            _BOUNDARY, self._policy, lambda limit: self._ask_in_turn(body, limit), self._count_retry, missing
        )

    async def check(self) -> None:
        """Search once at the first retriever, without retries; for start-up.

        Raises: NeighbourError saying what to change.
        """
        body = json.dumps({"queries": ["check"], "topk": 1, "return_scores": True}).encode()
        try:
            await self._retrievers[0].attempt(body, lambda reply: read_passages(reply, 1))
        except AttemptFailed as failure:
            advice = "Start it with deploy/start_cluster.sh, or change retriever.url."
            raise NeighbourError(_BOUNDARY, f"{failure}. {advice}") from failure

    async def _ask_in_turn(self, body: bytes, limit: asyncio.Timeout) -> list[Passage]:
        """Return the first valid answer, of the node's own retriever if it gives one.

        Those whose breaker is open are passed over. When all are, it waits for the first that may be tried.
        """
        while True:
            failure: AttemptFailed | None = None
            for retriever in self._retrievers:
                try:
                    return await self._ask(retriever, body, limit)
                except BreakerOpen:
                    continue
                except AttemptFailed as error:
                    failure = error
            if failure is not None:
                raise failure
            with paused_deadline(limit):
                await first_ready([retriever.breaker for retriever in self._retrievers])

    async def _ask(self, retriever: HttpEndpoint, body: bytes, limit: asyncio.Timeout) -> list[Passage]:
        try:
            (found,) = await retriever.attempt(body, lambda reply: read_passages(reply, 1), limit=limit, waits=False)
        except AttemptFailed:
            retriever.stats.calls += 1
            retriever.stats.failures += 1
            raise
        retriever.stats.calls += 1
        note_source(retriever.content_hash)
        return list(found[: self._topk])

    def _count_retry(self) -> None:
        self._retrievers[-1].stats.retries += 1
