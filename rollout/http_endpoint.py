"""One URL that JSON is posted to: pooled connections, a cap on requests in flight, a circuit breaker, counters.

`rollout.reward_client` has one per reward endpoint, `rollout.retriever_client` one per retriever.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import httpx

from protocol.http_bodies import BodyError
from rollout.circuit_breaker import CircuitBreaker
from rollout.http_policy import AttemptFailed, HttpPolicy, failure_of_status, speaks_against_service
from rollout.http_pool import HttpPool

_T = TypeVar("_T")


@dataclass
class EndpointStats:
    """Counts since start, for metrics. A call ends in success or failure; it may take several attempts."""

    calls: int = 0
    failures: int = 0
    retries: int = 0


class HttpEndpoint:
    """Makes single attempts; retrying is the caller's, through `http_policy.retried`."""

    def __init__(self, url: str, headers: Mapping[str, str], policy: HttpPolicy, max_concurrency: int) -> None:
        self.url = url
        self.stats = EndpointStats()
        self.policy = policy
        self.breaker = CircuitBreaker(
            policy.breaker_threshold, policy.breaker_cooldown_s, is_failure=speaks_against_service
        )
        self._pool = HttpPool(policy.connect_timeout_s)
        self._headers = {"content-type": "application/json", **headers}
        self._slots = asyncio.Semaphore(max_concurrency)

    async def attempt(
        self, body: bytes, read: Callable[[bytes], _T], key: str | None = None, limit: asyncio.Timeout | None = None
    ) -> _T:
        """Post body once and return what `read` makes of the reply. key: sent as Idempotency-Key.

        Waits while the breaker is open, and for a free slot; `limit` stands still while it waits for the slot, since
        a queue in front of a slow service is no fault of that service. Whoever holds a slot has a deadline.
        Raises: AttemptFailed, also when `read` raises BodyError.
        """
        async with self.breaker.attempt(), self._slot(limit):
            try:
                async with asyncio.timeout(self.policy.attempt_timeout_s):
                    reply = await self._post(body, key)
            except TimeoutError:
                raise self._failed(f"no answer within {self.policy.attempt_timeout_s:g} s") from None
            except httpx.HTTPError as error:
                raise self._failed(_reason_of(error)) from error
            try:
                return read(reply)
            except BodyError as error:
                attempts = min(2, self.policy.max_attempts)
                raise AttemptFailed(f"{self.url}: in the reply {error}", attempts, status=200) from error

    async def close(self) -> None:
        """Close the kept connections."""
        await self._pool.close()

    async def _post(self, body: bytes, key: str | None) -> bytes:
        headers = {**self._headers, "idempotency-key": key} if key else self._headers
        async with (
            self._pool.client() as client,
            client.stream("POST", self.url, content=body, headers=headers) as response,
        ):
            reply = bytearray()
            async for chunk in response.aiter_bytes():
                reply += chunk
                if len(reply) > self.policy.max_reply_bytes:
                    raise AttemptFailed(f"{self.url}: the reply is over {self.policy.max_reply_bytes} bytes", 1)
            if response.status_code == 200:
                return bytes(reply)
            text, retry_after = reply.decode(errors="replace"), response.headers.get("retry-after")
            raise failure_of_status(self.url, response.status_code, text, retry_after, self.policy)

    def _failed(self, reason: str) -> AttemptFailed:
        return AttemptFailed(f"{self.url}: {reason}", self.policy.max_attempts)

    @asynccontextmanager
    async def _slot(self, limit: asyncio.Timeout | None) -> AsyncIterator[None]:
        clock = asyncio.get_running_loop()
        when = limit.when() if limit else None
        left_s = None if when is None else when - clock.time()
        if limit is not None:
            limit.reschedule(None)
        async with self._slots:
            if limit is not None and left_s is not None:
                limit.reschedule(clock.time() + left_s)
            yield


def _reason_of(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, httpx.ConnectError):
        return f"no connection ({error})"
    return f"{type(error).__name__} {error}".strip()
