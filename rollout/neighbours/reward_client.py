"""Requests rewards for finished trajectories from all endpoints over HTTP, and combines them into one.

A reward is never invented: every failure raises NeighbourError("reward:<name>"), and the group goes back.

    score(request) -> [each endpoint: slot -> breaker -> POST -> strict reply, with retries] -> combine
                      [an endpoint with weight 0: called and recorded, not combined]
"""

import asyncio
import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from typing import Any
from urllib.parse import quote

from protocol.errors import NeighbourError
from protocol.http.bodies import SampleScore, read_scores
from protocol.one_line import one_line
from protocol.settings.rewards import RewardEndpoint
from rollout.environments.timed_calls import timed_call
from rollout.neighbours.batcher import Batcher, split_if_refused
from rollout.neighbours.http.circuit_breaker import BreakerOpen, CircuitBreaker, first_ready
from rollout.neighbours.http.endpoint import HttpEndpoint, HttpPolicy
from rollout.neighbours.http.failures import AttemptFailed
from rollout.neighbours.http.pool import ClosedAtExit, headers_from_environment

# Limits of a trajectory's logs: the learner rejects a trajectory over them.
_MAX_LOGS, _MAX_LOG_NAME, _LARGEST_LOG = 64, 200, 1e18
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


@dataclass(frozen=True)
class Score:
    """The reward of one sample."""

    reward: float  # combination of the parts by rewards.combine, finite
    # endpoint's name -> reward before weights; with combine = shard, only one endpoint with a weight
    parts: Mapping[str, float]
    filter_score: float | None = None  # mean of the `scores` of endpoints with a weight; None: no scores
    logs: Mapping[str, float] = field(default_factory=dict)  # `extra_logs` by endpoint/name


class NoRewards:
    """Replaces the reward client in environments that return the reward themselves. Its scores are 0 without parts."""

    is_accepting = True

    async def score(self, request: ScoreRequest) -> Score:
        return Score(0.0, {})

    async def check(self, row: ScoreRequest | None = None) -> None:
        pass

    async def close(self) -> None:
        pass


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
    def breaker(self) -> CircuitBreaker:
        """Open while the endpoint is down."""
        return self._http.breaker

    async def score(self, request: ScoreRequest) -> SampleScore:
        """Return the endpoint's result for the sample. Raises: NeighbourError; BreakerOpen unless it waits."""
        with timed_call("reward", self.name):
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
                if failure.status == 200:
                    advice = f"Correct the service, or change rewards.endpoints (name {self.name})."
                elif failure.status in _ALIVE:
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


class RewardClient(ClosedAtExit):
    """Scores samples at all endpoints, in one event loop.

    default_token: bearer token for endpoints without their own Authorization header; only for services of the cluster.
    Raises: OperatorError if a header's environment variable is not set.
    """

    def __init__(
        self,
        endpoints: Sequence[RewardEndpoint],
        combine: str,
        default_token: str | None = None,
        policy: HttpPolicy | None = None,
    ) -> None:
        """combine: rewards.combine. policy: time limits and retries of each request; None: the defaults."""
        policy = policy or HttpPolicy()
        self._combine = combine
        self._weights = {endpoint.name: endpoint.weight for endpoint in endpoints}
        self._scorers = [
            EndpointScorer(
                endpoint, _headers_of(endpoint, default_token), policy, waits=combine != "shard" or not endpoint.weight
            )
            for endpoint in endpoints
        ]
        # With combine = shard, a sample goes to one of these; the other endpoints score every sample.
        self._shards = [s for s in self._scorers if combine == "shard" and self._weights[s.name]]
        self._always = [s for s in self._scorers if s not in self._shards]

    async def close(self) -> None:
        for scorer in self._scorers:
            await scorer.close()

    @property
    def is_accepting(self) -> bool:
        """False while samples cannot be scored: an endpoint is down, or all shards are."""
        if self._shards and all(scorer.breaker.is_open for scorer in self._shards):
            return False
        return not any(scorer.breaker.is_open for scorer in self._always)

    async def score(self, request: ScoreRequest) -> Score:
        """Return the sample's reward; blocks until all endpoints answer, at most their overall deadline.

        The deadline is paused while an endpoint is down: the caller limits that wait.
        Raises: NeighbourError("reward:<name>") without a valid reward, NeighbourError("prompt") for a label that JSON
        cannot represent.
        """
        check_label(request.label)
        results = await self._score_everywhere(request)
        parts = {name: scored.reward for name, scored in results.items()}
        reward = combine_parts(parts, self._weights, self._combine)
        if not math.isfinite(reward):
            raise NeighbourError("reward:" + "+".join(parts), f"the parts {parts} combine to {reward}")
        scores = [one.score for name, one in results.items() if one.score is not None and self._weights[name]]
        return Score(reward, parts, math.fsum(scores) / len(scores) if scores else None, _logs_of(results))

    async def check(self, row: ScoreRequest | None = None) -> None:
        """Request a reward for a data row from every endpoint; for None for a made-up one, which they may refuse.

        Raises: NeighbourError with the first unusable endpoint and the remedy.
        """
        if row is not None:
            check_label(row.label)
        for scorer in self._scorers:
            await scorer.check(row)

    async def _score_at(self, scorer: EndpointScorer, request: ScoreRequest) -> tuple[str, SampleScore]:
        return scorer.name, await scorer.score(request)

    async def _score_everywhere(self, request: ScoreRequest) -> dict[str, SampleScore]:
        calls = [self._score_at(scorer, request) for scorer in self._always]
        if self._shards:
            calls.append(self._score_at_a_shard(request))
        first: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(call) for call in calls]
        except* NeighbourError as failures:
            first = failures.exceptions[0]  # it cancelled the other calls
        if first is not None:
            raise first  # out of the block, in which Python 3.11.2 makes a group of it
        return dict(task.result() for task in tasks)

    async def _score_at_a_shard(self, request: ScoreRequest) -> tuple[str, SampleScore]:
        """Score at one endpoint: the sample's own while it is up, else another, else the first that returns."""
        number = zlib.crc32(request.key.encode())
        own = self._shards[number % len(self._shards)]
        while True:
            ready = [scorer for scorer in self._shards if scorer.breaker.may_pass]
            scorer = own if own in ready or not ready else ready[number % len(ready)]
            try:
                return await self._score_at(scorer, request)
            except BreakerOpen:
                await first_ready([scorer.breaker for scorer in self._shards])


def _logs_of(results: Mapping[str, SampleScore]) -> dict[str, float]:
    """Return the first 64 logs by endpoint/name: the limit of a trajectory."""
    logs = {f"{name}/{log}": value for name, scored in results.items() for log, value in scored.logs.items()}
    usable = [name for name in sorted(logs) if len(name) <= _MAX_LOG_NAME and abs(logs[name]) <= _LARGEST_LOG]
    return {name: logs[name] for name in usable[:_MAX_LOGS]}


def combine_parts(parts: Mapping[str, float], weights: Mapping[str, float], combine: str) -> float:
    """Return one reward: the sum, weighted mean or product of weight * part; shard: the one part with a weight.

    A part with weight 0 is omitted.
    """
    used = {name: weights[name] for name in parts if weights[name]}
    weighted = [weight * parts[name] for name, weight in used.items()]
    if combine == "product":
        return math.prod(weighted)
    if combine == "mean":
        return math.fsum(weighted) / math.fsum(used.values())
    return math.fsum(weighted)


def _headers_of(endpoint: RewardEndpoint, default_token: str | None) -> dict[str, str]:
    """Return the headers of an endpoint's requests. Raises: OperatorError for a variable that is not set."""
    headers = headers_from_environment(endpoint.headers_env, f"rewards.endpoints {endpoint.name}")
    if default_token and "authorization" not in headers:
        headers["authorization"] = f"Bearer {default_token}"
    return headers
