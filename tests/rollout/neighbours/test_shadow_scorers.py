"""Shadow endpoints against real servers: what they give is recorded, what they do costs no sample."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.errors import NeighbourError
from protocol.settings.rewards import RewardEndpoint
from rollout.neighbours.http.retries import HttpPolicy
from rollout.neighbours.reward_client import RewardClient, Score, ScoreRequest
from tests.fakes.http_servers import Answer, ScriptedServer, free_address, scripted_server

FAST = HttpPolicy(min_backoff_s=0.005, max_backoff_s=0.02, breaker_cooldown_s=30.0, breaker_after_s=0.0)
REQUEST = ScoreRequest(key="p1/0", prompt="What? ", response="That.", label="That")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


def endpoint(name: str, url: str, **more: Any) -> RewardEndpoint:
    return RewardEndpoint.model_validate({"name": name, "url": url, **more})


def client_of(server: ScriptedServer, shadow_url: str, shadow_wait_s: float = 30.0, **more: Any) -> RewardClient:
    endpoints = [
        endpoint("math", server.script("math", Answer({"rewards": [0.5]}))),
        endpoint("new", shadow_url, shadow=True, **more),
    ]
    return RewardClient(endpoints, "mean", policy=FAST, shadow_wait_s=shadow_wait_s)


async def test_a_shadow_is_recorded_and_is_no_part_of_the_reward(server: ScriptedServer) -> None:
    reply = {"rewards": [7.0], "scores": [1.0], "extra_logs": {"length": [3.0], "reward": [9.0]}}
    async with client_of(server, server.script("new", Answer(reply))) as client:
        logs = {"new/answered": 1.0, "new/reward": 7.0, "new/length": 3.0}
        assert await client.score(REQUEST) == Score(0.5, {"math": 0.5}, None, logs)
        assert client.shadow_misses == {}
    assert server.received["new"][0].body == server.received["math"][0].body


@pytest.mark.parametrize("answer", [Answer("oops", 500), Answer("down", 503), Answer({"rewards": [None]})])
async def test_a_shadow_that_fails_is_asked_once_and_costs_nothing(server: ScriptedServer, answer: Answer) -> None:
    async with client_of(server, server.script("new", answer)) as client:
        assert await client.score(REQUEST) == Score(0.5, {"math": 0.5}, None, {"new/answered": 0.0})
        assert client.shadow_misses == {"shadow:new": 1}
        assert client.is_accepting
    assert len(server.received["new"]) == 1


async def test_a_shadow_that_is_down_stops_no_leases_and_is_not_waited_for(server: ScriptedServer) -> None:
    async with client_of(server, free_address()) as client:
        for _ in range(5):
            await client.score(REQUEST)
        assert client.is_accepting
        assert client.shadow_misses == {"shadow:new": 5}


async def test_a_slow_shadow_holds_a_sample_up_for_its_own_limit_alone(server: ScriptedServer) -> None:
    slow = server.script("new", Answer({"rewards": [1.0]}, delay_s=60.0))
    async with client_of(server, slow, shadow_wait_s=0.2) as client:
        started = time.monotonic()
        assert (await client.score(REQUEST)).logs == {"new/answered": 0.0}
        assert time.monotonic() - started < 30.0


async def test_a_sample_that_a_real_endpoint_fails_does_not_wait_for_a_shadow(server: ScriptedServer) -> None:
    endpoints = [
        endpoint("math", server.script("math", Answer("no", 400))),
        endpoint("new", server.script("new", Answer({"rewards": [1.0]}, delay_s=60.0)), shadow=True),
    ]
    async with RewardClient(endpoints, "sum", policy=FAST, shadow_wait_s=60.0) as client:
        started = time.monotonic()
        with pytest.raises(NeighbourError, match="reward:math"):
            await client.score(REQUEST)
        assert time.monotonic() - started < 30.0


async def test_a_shadow_that_cannot_be_used_is_no_reason_not_to_start(server: ScriptedServer) -> None:
    async with client_of(server, free_address()) as client:
        await client.check()


async def test_the_start_of_logs_is_the_shadows_however_many_logs_others_give(server: ScriptedServer) -> None:
    many = {"rewards": [0.5], "extra_logs": {f"log{i:03}": [1.0] for i in range(80)}}
    endpoints = [
        endpoint("math", server.script("math", Answer(many))),
        endpoint("new", server.script("new", Answer({"rewards": [7.0]})), shadow=True),
    ]
    async with RewardClient(endpoints, "sum", policy=FAST, shadow_wait_s=30.0) as client:
        logs = (await client.score(REQUEST)).logs
    assert (len(logs), logs["new/reward"]) == (64, 7.0)
