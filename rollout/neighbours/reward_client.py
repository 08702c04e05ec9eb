"""Rewards of finished trajectories, asked for over HTTP at every configured endpoint and combined into one.

A reward is never invented: whatever goes wrong raises
NeighbourError("reward:<name>"), and the group goes back.

    score(request) -> [each endpoint: breaker -> slot -> POST -> strict reply, retried by http_policy] -> combine
                      [an endpoint of weight 0: asked and recorded, not combined]
"""

import asyncio
import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from protocol.errors import NeighbourError, OperatorError
from protocol.http.bodies import Scored
from protocol.settings.rewards import RewardEndpoint
from rollout.neighbours.http.circuit_breaker import BreakerOpen, first_ready
from rollout.neighbours.http.endpoint import EndpointStats
from rollout.neighbours.http.headers import headers_from_environment
from rollout.neighbours.http.retries import HttpPolicy
from rollout.neighbours.reward_endpoint import EndpointScorer
from rollout.neighbours.reward_request import ScoreRequest, check_label

__all__ = ["RewardClient", "Score", "ScoreRequest"]


_MAX_LOGS, _MAX_LOG_NAME = 64, 200
# Learners take no larger number, and a curve shows none.
_LARGEST_LOG = 1e18


@dataclass(frozen=True)
class Score:
    """What the reward services gave one sample."""

    reward: float  # the parts combined as rewards.combine says, finite
    # endpoint's name -> its reward before weights; with combine = shard, of those with a weight one endpoint's alone
    parts: Mapping[str, float]
    filter_score: float | None = None  # mean of the `scores` of endpoints with a weight; None: there are none
    logs: Mapping[str, float] = field(default_factory=dict)  # the endpoints' `extra_logs`, by endpoint/name


class RewardClient:
    """Scores samples at all endpoints; an async context manager, of one event loop.

    default_token: bearer token for endpoints without an Authorization header of their own; give it only where all of
    them are this cluster's services, since it is sent to each of them.
    Raises: OperatorError when a header's environment variable is not set, or the weights cannot be combined.
    """

    def __init__(
        self,
        endpoints: Sequence[RewardEndpoint],
        combine: str,
        default_token: str | None = None,
        policy: HttpPolicy | None = None,
    ) -> None:
        _check_settings(endpoints, combine)
        policy = policy or HttpPolicy()
        self._combine = combine
        self._weights = {endpoint.name: endpoint.weight for endpoint in endpoints}
        self._scorers = [
            EndpointScorer(
                endpoint, _headers_of(endpoint, default_token), policy, waits=combine != "shard" or not endpoint.weight
            )
            for endpoint in endpoints
        ]
        # With combine = shard a sample has one of these; the others are asked about every sample.
        self._shards = [s for s in self._scorers if combine == "shard" and self._weights[s.name]]
        self._asked_always = [s for s in self._scorers if s not in self._shards]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        for scorer in self._scorers:
            await scorer.close()

    @property
    def is_accepting(self) -> bool:
        """False while finished trajectories could not be scored: an endpoint is down; with shard, all shards are."""
        if self._shards and all(scorer.breaker.is_open for scorer in self._shards):
            return False
        return not any(scorer.breaker.is_open for scorer in self._asked_always)

    @property
    def stats(self) -> Mapping[str, EndpointStats]:
        """Calls, failures and retries since start, by endpoint name."""
        return {scorer.name: dataclasses.replace(scorer.stats) for scorer in self._scorers}

    async def score(self, request: ScoreRequest) -> Score:
        """Return the sample's reward; blocks until every endpoint answered, at most its overall deadline.

        That deadline stands still while the endpoint is down: the caller bounds the wait for it.
        Raises: NeighbourError("reward:<name>") when an endpoint gave no valid reward, NeighbourError("prompt") when
        the row's label cannot be sent.
        """
        check_label(request.label)
        given = await self._ask_all(request)
        parts = {name: scored.reward for name, scored in given.items()}
        reward = combine_parts(parts, self._weights, self._combine)
        if not math.isfinite(reward):
            raise NeighbourError("reward:" + "+".join(parts), f"the parts {parts} combine to {reward}")
        scores = [one.score for name, one in given.items() if one.score is not None and self._weights[name]]
        return Score(reward, parts, math.fsum(scores) / len(scores) if scores else None, _logs_of(given))

    async def check(self, probe: ScoreRequest | None = None) -> None:
        """Ask every endpoint once for a reward; for start-up.

        probe: a real row with an empty response; every status but 200 is then a failure. Without one the endpoints
        get a made-up sample, which a sound function may refuse (400, 422) or trip over (500).
        Raises: NeighbourError naming the first endpoint that cannot be used, and what to change.
        """
        for scorer in self._scorers:
            await scorer.check(probe)

    async def _ask(self, scorer: EndpointScorer, request: ScoreRequest) -> tuple[str, Scored]:
        return scorer.name, await scorer.score(request)

    async def _ask_all(self, request: ScoreRequest) -> dict[str, Scored]:
        questions = [self._ask(scorer, request) for scorer in self._asked_always]
        if self._shards:
            questions.append(self._ask_shard(request))
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(question) for question in questions]
        except* NeighbourError as failures:
            # The first one cancelled its siblings; it is the one to report.
            raise failures.exceptions[0] from None
        return dict(task.result() for task in asked)

    async def _ask_shard(self, request: ScoreRequest) -> tuple[str, Scored]:
        """Ask one endpoint: always the same one for a sample while it is up, else another, or the first to be up."""
        while True:
            ready = [scorer for scorer in self._shards if scorer.breaker.may_pass] or self._shards
            try:
                return await self._ask(ready[zlib.crc32(request.key.encode()) % len(ready)], request)
            except BreakerOpen:
                await first_ready([scorer.breaker for scorer in self._shards])


def _logs_of(given: Mapping[str, Scored]) -> dict[str, float]:
    """Return the first 64 logs by endpoint/name; a trajectory has room for no more, nor for longer names."""
    logs = {f"{name}/{log}": value for name, scored in given.items() for log, value in scored.logs.items()}
    usable = [name for name in sorted(logs) if len(name) <= _MAX_LOG_NAME and abs(logs[name]) <= _LARGEST_LOG]
    return {name: logs[name] for name in usable[:_MAX_LOGS]}


def combine_parts(parts: Mapping[str, float], weights: Mapping[str, float], combine: str) -> float:
    """Return one reward: the sum, weighted mean or product of weight * part; shard: the one part with a weight.

    A part of weight 0 is left out.
    """
    used = {name: weights[name] for name in parts if weights[name]}
    weighted = [weight * parts[name] for name, weight in used.items()]
    if combine == "product":
        return math.prod(weighted)
    if combine == "mean":
        return math.fsum(weighted) / math.fsum(used.values())
    return math.fsum(weighted)


def _check_settings(endpoints: Sequence[RewardEndpoint], combine: str) -> None:
    if not endpoints:
        raise OperatorError("settings: rewards.endpoints is empty. Give at least one endpoint.")
    if combine not in ("sum", "mean", "product", "shard"):
        raise OperatorError(f"settings: rewards.combine = {combine}. Expected sum, mean, product or shard.")
    if combine == "mean" and math.fsum(endpoint.weight for endpoint in endpoints) == 0:
        raise OperatorError(
            "settings: rewards.combine = mean over endpoints whose weights add up to 0. Change a weight."
        )


def _headers_of(endpoint: RewardEndpoint, default_token: str | None) -> dict[str, str]:
    headers = headers_from_environment(endpoint.headers_env, f"rewards.endpoints {endpoint.name}")
    if default_token and "authorization" not in headers:
        headers["authorization"] = f"Bearer {default_token}"
    return headers
