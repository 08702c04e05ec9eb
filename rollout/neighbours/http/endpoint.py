"""One URL that JSON is posted to: pooled connections, a cap on requests in flight, a circuit breaker, counters."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from protocol.http.bodies import CONTENT_HASH, BodyError
from rollout.neighbours.http.circuit_breaker import CircuitBreaker
from rollout.neighbours.http.pool import HttpPool, NoAnswer
from rollout.neighbours.http.retries import (
    AttemptFailed,
    HttpPolicy,
    counts_against_service,
    failure_of_status,
    is_absence,
    is_answer,
)

_T = TypeVar("_T")

# An endpoint is unreliable when so many of its last attempts found nobody there.
_LAST_ATTEMPTS = 32
_MIN_ATTEMPTS = 16
_UNRELIABLE_SHARE = 0.2
_TARGET_LENGTH = 200  # characters of an address that somebody else wrote
# So much of an error page is read; 500 characters of it are shown.
_ERROR_BYTES = 4000
_HASH_LENGTH = 128


@dataclass
class EndpointStats:
    """Counts since the run attached, for metrics. A call ends in success or failure, after one attempt or several."""

    calls: int = 0  # that ended or are under way; a retriever's: its attempts
    failures: int = 0  # calls that gave nothing
    retries: int = 0  # further attempts of calls
    attempts: int = 0  # requests made, retries and checks included


class HttpEndpoint:
    """Makes single attempts; `rollout.neighbours.http.retries.called` makes several of them a call."""

    def __init__(self, url: str, headers: Mapping[str, str], policy: HttpPolicy, max_concurrency: int) -> None:
        self.url = url
        self.content_hash = ""  # what the service said of its content in its last answer; "": nothing
        self.stats = EndpointStats()
        self.policy = policy
        self.breaker = CircuitBreaker(
            policy.breaker_threshold,
            policy.breaker_cooldown_s,
            policy.breaker_max_cooldown_s,
            policy.breaker_after_s,
            is_failure=counts_against_service,
            is_answer=is_answer,
            name=url,
        )
        self._pool = HttpPool(policy.connect_timeout_s)
        # A compressed reply could be a thousand times what was read of it.
        self._headers = {"content-type": "application/json", "accept-encoding": "identity", **headers}
        self._slots = asyncio.Semaphore(max_concurrency)
        self._were_absences: deque[bool] = deque(maxlen=_LAST_ATTEMPTS)

    async def attempt(
        self,
        body: bytes,
        read: Callable[[bytes], _T],
        key: str | None = None,
        limit: asyncio.Timeout | None = None,
        waits: bool = True,
    ) -> _T:
        """Post body once and return what `read` makes of the reply. key: sent as Idempotency-Key.

        Waits for a free slot and while the breaker is open; `limit` stands still then, and during a trial: a queue, or
        an outage, is no fault of this request. Whoever holds a slot has a deadline.
        Raises: AttemptFailed, also when `read` raises BodyError; BreakerOpen at an open breaker unless `waits`.
        """
        with paused_deadline(limit) as resume:
            # The slot first: what queues for it must not have been let through before an outage began.
            async with self._slots:
                try:
                    async with self.breaker.attempt(waits) as is_trial:
                        if not is_trial:
                            resume()
                        reply = await self._attempt_once(body, read, key)
                except AttemptFailed as failure:
                    self._judge(failure)
                    raise
                self._were_absences.append(False)
                return reply

    def _judge(self, failure: AttemptFailed) -> None:
        """Note whether a failure is one of many: then the request waits for the service instead of giving up."""
        self._were_absences.append(is_absence(failure))
        seen = self._were_absences
        is_unreliable = len(seen) >= _MIN_ATTEMPTS and sum(seen) >= _UNRELIABLE_SHARE * len(seen)
        failure.waits_for_breaker = is_absence(failure) and self.breaker.is_open
        failure.does_not_count = failure.waits_for_breaker or (is_absence(failure) and is_unreliable)
        if is_unreliable and failure.max_attempts > 1:
            failure.max_attempts += 1

    async def _attempt_once(self, body: bytes, read: Callable[[bytes], _T], key: str | None) -> _T:
        self.stats.attempts += 1
        try:
            async with asyncio.timeout(self.policy.attempt_timeout_s):
                reply = await self._post(body, key)
        except TimeoutError:
            raise self._failed(f"no answer within {self.policy.attempt_timeout_s:g} s") from None
        except NoAnswer as error:
            raise self._failed(str(error)) from error
        try:
            return read(reply)
        except BodyError as error:
            raise self._unusable(f"in the reply {error}") from error

    async def close(self) -> None:
        """Close the kept connections."""
        await self._pool.close()

    async def _post(self, body: bytes, key: str | None) -> bytes:
        headers = {**self._headers, "idempotency-key": key} if key else self._headers
        answer = await self._pool.post(self.url, body, headers, (self.policy.max_reply_bytes, _ERROR_BYTES))
        if answer.status != 200:
            text, retry_after = answer.body.decode(errors="replace"), answer.headers.get("retry-after")
            if 300 <= answer.status < 400 and "location" in answer.headers:
                target = answer.headers["location"][:_TARGET_LENGTH]
                text = f"redirected to {target!r}, which is not followed. Give that address if it is yours"
            raise failure_of_status(self.url, answer.status, text, retry_after, self.policy)
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise self._unusable("the reply is compressed, which was not asked for")
        if not answer.is_whole:
            raise self._unusable(f"the reply is over {self.policy.max_reply_bytes} bytes")
        self.content_hash = _content_hash(answer.headers.get(CONTENT_HASH, ""))
        return answer.body

    def _failed(self, reason: str) -> AttemptFailed:
        return AttemptFailed(f"{self.url}: {reason}", self.policy.max_attempts)

    def _unusable(self, problem: str) -> AttemptFailed:
        """Return the failure of an answer that is no answer to what was asked; a second one like it is final."""
        return AttemptFailed(f"{self.url}: {problem}", min(2, self.policy.max_attempts), status=200)


@contextmanager
def paused_deadline(limit: asyncio.Timeout | None) -> Iterator[Callable[[], None]]:
    """Stop a deadline's clock until the block ends, or the function it yields is called."""
    clock = asyncio.get_running_loop()
    when = limit.when() if limit is not None else None
    if limit is None or when is None:
        yield lambda: None
        return
    left_s = when - clock.time()
    limit.reschedule(None)

    def resume() -> None:
        if limit.when() is None:
            limit.reschedule(clock.time() + left_s)

    try:
        yield resume
    finally:
        resume()


def _content_hash(text: str) -> str:
    """Return a header's digest; "" for what is none: the header is anyone's."""
    return text if len(text) <= _HASH_LENGTH and text.isalnum() and text.isascii() else ""
