"""The reward client during outages."""

import asyncio
import time
from dataclasses import replace

import pytest

from rollout.neighbours.reward_client import RewardClient
from tests.fakes.http_servers import Answer, Received, ScriptedServer, counted_posts, free_address, scripted_server
from tests.rollout.neighbours.asking_rewards import FAST, GOOD, endpoint, request


async def test_no_sample_is_lost_in_a_short_outage() -> None:
    policy = replace(FAST, breaker_threshold=2, breaker_after_s=0.0, breaker_cooldown_s=0.5, overall_timeout_s=60.0)
    with scripted_server() as scripted:
        url = scripted.script("restart", Answer("starting", 503), Answer("starting", 503), Answer("up", 502), GOOD)
        async with RewardClient([endpoint(url)], "sum", policy=policy) as client:
            first = asyncio.create_task(client.score(request("p0/0")))
            while client.is_accepting and not first.done():
                await asyncio.sleep(0.005)
            others = [asyncio.create_task(client.score(request(f"p{i}/0"))) for i in range(1, 20)]
            await asyncio.sleep(0.05)
            assert len(scripted.received["restart"]) == 2
            assert {(await call).reward for call in [first, *others]} == {0.5}
            assert client.is_accepting


@pytest.mark.parametrize(("combine", "with_one_up"), [("shard", True), ("sum", False)])
async def test_client_is_accepting_while_samples_can_be_scored(
    server: ScriptedServer, combine: str, with_one_up: bool
) -> None:
    down = [endpoint(free_address(), "a"), endpoint(server.script("b", Answer("no", 503)), "b")]
    up = endpoint(server.script("c", GOOD), "c")
    policy = replace(FAST, breaker_threshold=1, breaker_after_s=0.0, breaker_cooldown_s=60.0, max_attempts=1)
    for endpoints, expected in ((down, False), ([*down, up], with_one_up)):
        with counted_posts() as posts:
            async with RewardClient(endpoints, combine, policy=policy) as client:
                assert client.is_accepting
                calls = [asyncio.create_task(client.score(request(f"p{i}"))) for i in range(50)]
                async with asyncio.timeout(20.0):
                    while not all(posts[str(each.url)] > 1 for each in down) or client.is_accepting is not expected:
                        await asyncio.sleep(0.01)
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)


async def test_another_shard_scores_the_samples_of_a_dead_one(server: ScriptedServer) -> None:
    endpoints = [endpoint(free_address(), "a"), endpoint(server.script("shard_up", GOOD), "b")]
    policy = replace(FAST, breaker_threshold=1, breaker_after_s=0.0, breaker_cooldown_s=60.0)
    async with RewardClient(endpoints, "shard", policy=policy) as client:
        scores = await asyncio.gather(*(client.score(request(f"p{i}")) for i in range(20)))
    assert {tuple(score.parts) for score in scores} == {("b",)}


async def test_samples_keep_their_own_shard_while_another_one_is_down(server: ScriptedServer) -> None:
    up = [endpoint(server.script(f"own_{name}", GOOD), name) for name in ("a", "b")]
    policy = replace(FAST, breaker_threshold=1, breaker_after_s=0.0, breaker_cooldown_s=60.0)
    requests = [request(f"p{i}") for i in range(30)]
    shards: dict[bool, list[str]] = {}
    for is_up in (True, False):
        third = endpoint(server.script("own_c", GOOD) if is_up else free_address(), "c")
        async with RewardClient([*up, third], "shard", policy=policy) as client:
            shards[is_up] = [next(iter((await client.score(each)).parts)) for each in requests]
    kept = [(own, used) for own, used in zip(shards[True], shards[False], strict=True) if own != "c"]
    assert 0 < len(kept) < 30
    assert all(own == used for own, used in kept)


async def test_score_waits_through_an_outage_longer_than_its_deadline(server: ScriptedServer) -> None:
    up_at = time.monotonic() + 1.5

    def answer(_: Received) -> Answer:
        return GOOD if time.monotonic() > up_at else Answer("down", 503)

    url = server.script_by("outage", answer)
    policy = replace(FAST, overall_timeout_s=0.3, breaker_after_s=0.0, breaker_cooldown_s=0.05)
    policy = replace(policy, breaker_max_cooldown_s=0.2)
    async with RewardClient([endpoint(url, timeout_s=0.4)], "sum", policy=policy) as client:  # 1.2 s in all
        scores = await asyncio.gather(*(client.score(request(f"p{i}")) for i in range(10)))
    assert [score.reward for score in scores] == [0.5] * 10
    assert len(server.received["outage"]) < 10 + 9 + 10 + 10  # ten at once, one every 0.2 s, ten at the end


async def test_failures_are_free_while_the_service_fails_other_samples_too(server: ScriptedServer) -> None:
    """Every sample meets a busy service five times, one more than a call has attempts."""
    counts: dict[str, int] = {}

    def answer(received: Received) -> Answer:
        key = received.headers["idempotency-key"]
        counts[key] = counts.get(key, 0) + 1
        return GOOD if counts[key] > 5 else Answer("busy", 503)

    url = server.script_by("unreliable", answer)
    async with RewardClient([endpoint(url)], "sum", policy=FAST) as client:
        first = await asyncio.gather(*(client.score(request(f"p{i}")) for i in range(40)))
    assert [score.reward for score in first] == [0.5] * 40
