"""One reward endpoint as the reward client sees it: requests in the contract's form, batches, retries, one check."""

import dataclasses
from collections.abc import Mapping, Sequence

from protocol.errors import NeighbourError
from protocol.http.bodies import Scored, read_scored
from protocol.settings.rewards import RewardEndpoint
from rollout.neighbours.batcher import Batcher, apart_if_refused
from rollout.neighbours.http.circuit_breaker import CircuitBreaker
from rollout.neighbours.http.endpoint import EndpointStats, HttpEndpoint
from rollout.neighbours.http.retries import AttemptFailed, HttpPolicy, called
from rollout.neighbours.reward_request import ScoreRequest, body_of, key_of

_MADE_UP_PROBE = ScoreRequest(key="sluice-check", prompt="1 + 1 =", response=" 2", label="2")


class EndpointScorer:
    """Asks one endpoint for rewards."""

    def __init__(
        self, endpoint: RewardEndpoint, headers: Mapping[str, str], policy: HttpPolicy, waits: bool = True
    ) -> None:
        """waits: whether samples wait here while the endpoint is down, since no other can score them."""
        self._waits = waits
        self.name = endpoint.name
        self._boundary = f"reward:{endpoint.name}"
        self._policy = dataclasses.replace(
            policy,
            attempt_timeout_s=endpoint.timeout_s,
            # A user who allows one attempt more than a minute wants more than one of them.
            overall_timeout_s=max(policy.overall_timeout_s, 3 * endpoint.timeout_s),
        )
        self._http = HttpEndpoint(str(endpoint.url), headers, self._policy, endpoint.max_concurrency)
        self._batcher = (
            Batcher[ScoreRequest, Scored](endpoint.batch_size, lambda requests: apart_if_refused(requests, self._call))
            if endpoint.batch_size > 1
            else None
        )

    @property
    def stats(self) -> EndpointStats:
        return self._http.stats

    @property
    def breaker(self) -> CircuitBreaker:
        """Open while the endpoint is down."""
        return self._http.breaker

    async def score(self, request: ScoreRequest) -> Scored:
        """Return what the endpoint gives the sample; while the endpoint is down it waits, unless it was made not to.

        Raises: NeighbourError when none came; BreakerOpen instead of waiting.
        """
        if self._batcher is not None:
            return await self._batcher.add(request)
        return (await self._call([request]))[0]

    async def check(self, probe: ScoreRequest | None) -> None:
        """Ask once, without retries. Raises: NeighbourError saying what to change."""
        request = probe or _MADE_UP_PROBE
        try:
            await self._http.attempt(body_of([request]), lambda reply: read_scored(reply, 1), key_of([request]))
        except AttemptFailed as failure:
            if probe is None and failure.status in (400, 422, 500):
                return
            advice = f"Start the service, or change rewards.endpoints (name {self.name})."
            raise NeighbourError(self._boundary, f"{failure}. {advice}") from failure

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()
        await self._http.close()

    async def _call(self, requests: Sequence[ScoreRequest]) -> tuple[Scored, ...]:
        body, key = body_of(requests), key_of(requests)
        self.stats.calls += 1
        try:
            return await called(
                self._boundary,
                self._policy,
                lambda limit: self._http.attempt(
                    body, lambda reply: read_scored(reply, len(requests)), key, limit, self._waits
                ),
                self._count_retry,
                f"{self._http.url}: no reward",
            )
        except NeighbourError:
            self.stats.failures += 1
            raise

    def _count_retry(self) -> None:
        self.stats.retries += 1
