"""Reward endpoints of a test's server, and a sample."""

from typing import Any

from protocol.settings.rewards import RewardEndpoint
from rollout.neighbours.http.endpoint import HttpPolicy
from rollout.neighbours.reward_client import RewardClient, Score, ScoreRequest
from tests.fakes.http_servers import Answer

FAST = HttpPolicy(min_backoff_s=0.005, max_backoff_s=0.02, overall_timeout_s=30.0, breaker_cooldown_s=0.2)
GOOD = Answer({"rewards": [0.5]})


def endpoint(url: str, name: str = "math", **more: Any) -> RewardEndpoint:
    return RewardEndpoint.model_validate({"name": name, "url": url, "timeout_s": 10.0, **more})


def request(key: str = "p1/0") -> ScoreRequest:
    return ScoreRequest(key=key, prompt="What? ", response="That.", label={"target": ["That"]})


async def score_once(*endpoints: RewardEndpoint, combine: str = "sum", policy: HttpPolicy = FAST) -> Score:
    async with RewardClient(endpoints, combine, policy=policy) as client:
        return await client.score(request())
