"""One reward endpoint: the contract's request, batches, retries, one check at start-up."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from typing import Any
from urllib.parse import quote

from protocol.errors import NeighbourError
from protocol.http.bodies import SampleScore, read_scores
from protocol.one_line import one_line
from protocol.settings.rewards import RewardEndpoint
from rollout.neighbours.batcher import Batcher, split_if_refused
from rollout.neighbours.http.circuit_breaker import CircuitBreaker
from rollout.neighbours.http.endpoint import HttpEndpoint
from rollout.neighbours.http.failures import AttemptFailed
from rollout.neighbours.http.retries import HttpPolicy

_MISSING = object()  # a value that JSON cannot represent; its key is omitted
_ALIVE = (400, 422, 500)  # statuses of a working service for a made-up sample
_CHECK_ATTEMPTS = 2  # one 500 is often a flaky call in a user's function


@dataclass(frozen=True)
class ScoreRequest:
    """A finished sample."""

    key: str  # identifier, the same whenever this sample is sent
    prompt: str  # decoded text with special tokens
    response: str  # text after the prompt, including observations
    label: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None  # response without control tokens; None: unknown
    num_turns: int = 1  # turns that the policy wrote


_MADE_UP = ScoreRequest(key="sluice-check", prompt="1 + 1 =", response=" 2", label="2")


class EndpointScorer:
    """Requests rewards from one endpoint."""

    def __init__(
        self, endpoint: RewardEndpoint, headers: Mapping[str, str], policy: HttpPolicy, waits: bool = True
    ) -> None:
        """waits: whether samples wait while the endpoint is down, because no other can score them."""
        self._waits = waits
        self.name = endpoint.name
        self._boundary = f"reward:{endpoint.name}"
        policy = dataclasses.replace(
            policy,
            attempt_timeout_s=endpoint.timeout_s,
            # With a long time limit per attempt, a call still gets several attempts.
            overall_timeout_s=max(policy.overall_timeout_s, 3 * endpoint.timeout_s),
        )
        self._http = HttpEndpoint(str(endpoint.url), headers, policy, endpoint.max_concurrency)
        self._batcher = (
            Batcher[ScoreRequest, SampleScore](
                endpoint.batch_size, lambda requests: split_if_refused(requests, self._call)
            )
            if endpoint.batch_size > 1
            else None
        )

    @property
    def num_attempts(self) -> int:
        return self._http.num_attempts

    @property
    def breaker(self) -> CircuitBreaker:
        """Open while the endpoint is down."""
        return self._http.breaker

    async def score(self, request: ScoreRequest) -> SampleScore:
        """Return the endpoint's result for the sample. Raises: NeighbourError; BreakerOpen unless it waits."""
        if self._batcher is not None:
            return await self._batcher.add(request)
        return (await self._call([request]))[0]

    async def check(self, row: ScoreRequest | None = None) -> None:
        """Request one reward; a 500 for a data row is retried once.

        row: a data row with a response; None: a made-up one, which a service may refuse.
        Raises: NeighbourError with the remedy.
        """
        probe = row or _MADE_UP
        for number in range(1, _CHECK_ATTEMPTS + 1):
            try:
                await self._http.attempt(body_of([probe]), lambda reply: read_scores(reply, 1), key_of([probe]))
                return
            except AttemptFailed as failure:
                if row is None and failure.status in _ALIVE:
                    return
                if failure.status == 500 and number < _CHECK_ATTEMPTS:
                    continue
                advice = f"Start the service, or change rewards.endpoints (name {self.name})."
                if failure.status in _ALIVE:
                    sample = f"the first row with the response {probe.response!r}"
                    advice = f"It must return a reward for every response, also a wrong one. It was asked for {sample}."
                raise NeighbourError(self._boundary, f"{failure}. {advice}", failure.place) from failure

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()
        await self._http.close()

    async def _call(self, requests: Sequence[ScoreRequest]) -> tuple[SampleScore, ...]:
        return await self._http.call(
            self._boundary,
            body_of(requests),
            lambda reply: read_scores(reply, len(requests)),
            key_of(requests),
            "no reward",
            self._waits,
        )


def check_label(label: Any) -> None:
    """Raise NeighbourError("prompt") for a label that JSON cannot represent.

    It is checked before a request: in a batch it would fail the other samples. A label is never changed.
    """
    try:
        json.dumps(label, allow_nan=False, default=_as_text)
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"its label {one_line(repr(label), 80)} cannot be sent to a reward service: {error}"
        raise NeighbourError("prompt", f"{problem}. Change the row.") from None


def body_of(requests: Sequence[ScoreRequest]) -> bytes:
    """Return the JSON body. `columns` is present only if a row has other columns.

    Column values that JSON cannot represent are omitted, and become null inside lists. NaN, a missing number, becomes
    null.
    """
    body: dict[str, Any] = {
        "query": [request.prompt + request.response for request in requests],
        "prompts": [request.prompt for request in requests],
        "labels": [request.label for request in requests],
        "num_turns": [request.num_turns for request in requests],
    }
    if all(request.text is not None for request in requests):
        body["responses"] = [request.text for request in requests]
    if any(request.columns for request in requests):
        body["columns"] = [_as_json(dict(request.columns)) for request in requests]
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, default=_as_text)
    return text.encode(errors="replace")


def key_of(requests: Sequence[ScoreRequest]) -> str:
    """Return the Idempotency-Key: the sample's own, quoted for a header; for a batch a hash of all keys."""
    if len(requests) == 1:
        return quote(requests[0].key, safe="/:;,=.+-_ #")
    return hashlib.sha256("\n".join(request.key for request in requests).encode()).hexdigest()


def _as_text(value: Any) -> str:
    """Return a date or time as ISO 8601 text. Raises: TypeError for other types."""
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    raise TypeError(f"JSON has no {type(value).__name__}")


def _as_json(value: Any) -> Any:
    """Return a value as JSON can represent it, or _MISSING."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else _MISSING
    if isinstance(value, dict):
        parts = {key: _as_json(part) for key, part in value.items() if isinstance(key, str)}
        return {key: part for key, part in parts.items() if part is not _MISSING}
    if isinstance(value, list | tuple):
        # Positions in a list matter, so a missing value becomes null.
        return [None if part is _MISSING else part for part in map(_as_json, value)]
    if value is None or isinstance(value, str | int | bool):
        return value
    return value.isoformat() if isinstance(value, date | time) else _MISSING
