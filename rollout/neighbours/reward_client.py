"""Requests rewards for finished trajectories from all endpoints over HTTP, and combines them into one.

A reward is never invented: every failure raises NeighbourError("reward:<name>"), and the group goes back.

    score(request) -> [each endpoint: slot -> breaker -> POST -> strict reply, with retries] -> combine
                      [an endpoint with weight 0: called and recorded, not combined]
"""

import asyncio
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.errors import NeighbourError
from protocol.http.bodies import SampleScore
from protocol.settings.rewards import RewardEndpoint
from rollout.neighbours.http.circuit_breaker import BreakerOpen, first_ready
from rollout.neighbours.http.pool import ClosedAtExit, headers_from_environment
from rollout.neighbours.http.retries import HttpPolicy
from rollout.neighbours.reward_endpoint import EndpointScorer, ScoreRequest, check_label

_MAX_LOGS, _MAX_LOG_NAME = 64, 200
# The learner rejects larger numbers.
_LARGEST_LOG = 1e18


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

    @property
    def num_attempts(self) -> Mapping[str, int]:
        """Requests since the start, by endpoint name."""
        return {scorer.name: scorer.num_attempts for scorer in self._scorers}

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
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(call) for call in calls]
        except* NeighbourError as failures:
            # The first failure cancelled the other calls.
            raise failures.exceptions[0] from None
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
