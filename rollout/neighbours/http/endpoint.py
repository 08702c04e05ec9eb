"""One URL for POSTs of JSON: pooled connections, a cap on requests in flight, a circuit breaker, and retries of a call
within a number of attempts and a deadline."""

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from protocol.errors import NeighbourError
from protocol.http.bodies import CONTENT_HASH, BodyError
from rollout.environments.timed_calls import add_attempts
from rollout.neighbours.http.circuit_breaker import CircuitBreaker
from rollout.neighbours.http.failures import AttemptFailed, FailureKind, failure_of_status, opens_breaker
from rollout.neighbours.http.pool import HttpPool, NoAnswer

_T = TypeVar("_T")

# An endpoint is unreliable if this share of its last attempts met an absent or busy service.
_LAST_ATTEMPTS = 32
_MIN_ATTEMPTS = 16
_UNRELIABLE_SHARE = 0.2
_TARGET_LENGTH = 200  # characters of a redirect's target, which is untrusted
_ERROR_BYTES = 4000  # bytes of an error page that are read
_HASH_LENGTH = 128


@dataclass(frozen=True)
class HttpPolicy:
    """Limits of one call."""

    connect_timeout_s: float = 2.0
    attempt_timeout_s: float = 60.0  # time limit of an attempt, whole reply included
    overall_timeout_s: float = 180.0  # time limit of a call, without waits for a slot or an absent service
    max_attempts: int = 4  # failed attempts that end a call, without those in an outage
    min_backoff_s: float = 0.2
    max_backoff_s: float = 10.0
    max_retry_after_s: float = 60.0
    max_reply_bytes: int = 1 << 20
    breaker_threshold: int = 3  # consecutive failures that open the breaker
    breaker_after_s: float = 1.0  # shortest time from the first of these to the opening
    breaker_cooldown_s: float = 1.0  # time from the opening to the first trial
    breaker_max_cooldown_s: float = 5.0  # longest time between two trials


class HttpEndpoint:
    """Posts to one URL: `call` retries by the policy, `attempt` posts once."""

    def __init__(self, url: str, headers: Mapping[str, str], policy: HttpPolicy, max_concurrency: int) -> None:
        self.url = url
        self.content_hash = ""  # content hash in the service's last answer; "": none
        self.policy = policy
        self.breaker = CircuitBreaker(
            policy.breaker_threshold,
            policy.breaker_cooldown_s,
            policy.breaker_max_cooldown_s,
            policy.breaker_after_s,
            is_failure=opens_breaker,
            name=url,
        )
        self._pool = HttpPool(policy.connect_timeout_s)
        # A compressed reply could be a thousand times larger than the bytes that were read.
        self._headers = {"content-type": "application/json", "accept-encoding": "identity", **headers}
        self._slots = asyncio.Semaphore(max_concurrency)
        self._outages: deque[bool] = deque(maxlen=_LAST_ATTEMPTS)  # whether each attempt met an absent or busy service

    async def call(
        self,
        boundary: str,
        body: bytes,
        read: Callable[[bytes], _T],
        key: str,
        missing: str = "no answer",
        waits: bool = True,
    ) -> _T:
        """Return the result of the first successful attempt. missing: text for the error at the deadline.

        Raises: NeighbourError(boundary); BreakerOpen unless `waits`.
        """
        return await call_with_retries(
            boundary,
            self.policy,
            lambda limit: self.attempt(body, read, key, limit, waits),
            f"{self.url}: {missing}",
        )

    async def attempt(
        self,
        body: bytes,
        read: Callable[[bytes], _T],
        key: str | None = None,
        limit: asyncio.Timeout | None = None,
        waits: bool = True,
    ) -> _T:
        """Post body once and return `read(reply)`. key: sent as Idempotency-Key.

        Waits for a free slot and for the breaker. `limit`, the call's deadline, is paused meanwhile and during a trial,
        because the request did not cause the queue or the outage.
        Raises: AttemptFailed, also when `read` raises BodyError; BreakerOpen at an open breaker unless `waits`.
        """
        with paused_deadline(limit) as resume:
            # The slot comes first: a request in its queue must not have passed the breaker before an outage.
            async with self._slots:
                try:
                    async with self.breaker.attempt(waits) as is_trial:
                        if not is_trial:
                            resume()
                        reply = await self._attempt_once(body, read, key)
                except AttemptFailed as failure:
                    self._judge(failure)
                    raise
                self._outages.append(False)
                return reply

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()

    def _judge(self, failure: AttemptFailed) -> None:
        """Record the failure, and set whether it counts as an attempt: not while other requests fail too."""
        is_outage = failure.kind.value.is_free_in_outage
        self._outages.append(is_outage)
        num = len(self._outages)
        is_unreliable = num >= _MIN_ATTEMPTS and sum(self._outages) >= _UNRELIABLE_SHARE * num
        failure.waits_for_breaker = is_outage and self.breaker.is_open
        failure.is_free = failure.waits_for_breaker or (is_outage and is_unreliable)

    async def _attempt_once(self, body: bytes, read: Callable[[bytes], _T], key: str | None) -> _T:
        try:
            async with asyncio.timeout(self.policy.attempt_timeout_s):
                reply = await self._post(body, key)
        except TimeoutError:
            raise AttemptFailed(f"{self.url}: no answer within {self.policy.attempt_timeout_s:g} s") from None
        except NoAnswer as error:
            raise AttemptFailed(f"{self.url}: {error}") from error
        try:
            return read(reply)
        except BodyError as error:
            raise self._unusable(f"in the reply {error}") from error

    async def _post(self, body: bytes, key: str | None) -> bytes:
        headers = {**self._headers, "idempotency-key": key} if key else self._headers
        answer = await self._pool.post(self.url, body, headers, (self.policy.max_reply_bytes, _ERROR_BYTES))
        if answer.status != 200:
            text, retry_after = answer.body.decode(errors="replace"), answer.headers.get("retry-after")
            if 300 <= answer.status < 400 and "location" in answer.headers:
                target = answer.headers["location"][:_TARGET_LENGTH]
                text = f"redirected to {target!r}, which is not followed. Give that address if it is yours"
            raise failure_of_status(self.url, answer.status, text, retry_after, self.policy.max_retry_after_s)
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise self._unusable("the reply is compressed, which was not requested")
        if not answer.is_whole:
            raise self._unusable(f"the reply is over {self.policy.max_reply_bytes} bytes")
        self.content_hash = _content_hash(answer.headers.get(CONTENT_HASH, ""))
        return answer.body

    def _unusable(self, problem: str) -> AttemptFailed:
        return AttemptFailed(f"{self.url}: {problem}", FailureKind.FAILED, 200)


@contextmanager
def paused_deadline(limit: asyncio.Timeout | None) -> Iterator[Callable[[], None]]:
    """Pause a deadline until the block ends, or until the yielded function is called."""
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
    """Return a header's digest; "" for an invalid one, since the header is untrusted."""
    return text if len(text) <= _HASH_LENGTH and text.isalnum() and text.isascii() else ""


async def call_with_retries(
    boundary: str,
    policy: HttpPolicy,
    attempt: Callable[[asyncio.Timeout], Awaitable[_T]],
    timeout_text: str,
) -> _T:
    """Return the result of the first successful attempt.

    attempt: makes one attempt; it may pause the deadline that it receives.
    timeout_text: start of the error text of a timeout, such as `URL: no reward`.
    Raises: NeighbourError(boundary) with the last failure, the number of attempts and their duration.
    """
    started = time.monotonic()
    counts: Counter[FailureKind] = Counter()
    try:
        async with asyncio.timeout(policy.overall_timeout_s) as limit:
            for number in itertools.count(1):
                add_attempts(1)
                try:
                    return await attempt(limit)
                except AttemptFailed as failure:
                    if _is_last(failure, counts, policy):
                        times = "1 attempt" if number == 1 else f"{number} attempts"
                        detail = f"{failure} ({times} in {time.monotonic() - started:.1f} s)"
                        raise NeighbourError(boundary, detail, failure.place) from failure
                    await asyncio.sleep(_pause_s(failure, number, policy))
    except TimeoutError:
        detail = f"{timeout_text} within {policy.overall_timeout_s:g} s over all attempts"
        raise NeighbourError(boundary, detail) from None
    raise AssertionError("unreachable")


def _is_last(failure: AttemptFailed, counts: Counter[FailureKind], policy: HttpPolicy) -> bool:
    """Count a failure, unless it is free; return whether the call ends with it."""
    if failure.is_free:
        return False
    counts[failure.kind] += 1
    most = failure.kind.value.max_attempts or policy.max_attempts
    return counts[failure.kind] >= most or counts.total() >= policy.max_attempts


def _pause_s(failure: AttemptFailed, number: int, policy: HttpPolicy) -> float:
    """Return the pause after attempt `number`: the service's Retry-After plus a random part.

    Without it, clients with the same Retry-After would return together.
    """
    if failure.waits_for_breaker:
        return 0.0
    # The bound starts at five times the minimum: 1, 2, 4 s by default. 2**30 avoids an overflow.
    bound_s = min(policy.max_backoff_s, 5 * policy.min_backoff_s * 2 ** min(number - 1, 30))
    pause_s = random.uniform(policy.min_backoff_s, max(policy.min_backoff_s, bound_s))  # noqa: S311
    return failure.retry_after_s + pause_s
