"""The reward client and services that are busy, slow, broken or down."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from protocol.errors import NeighbourError
from rollout.neighbours.reward_client import RewardClient
from tests.fakes.http_servers import Answer, Received, ScriptedServer, free_address, scripted_server
from tests.rollout.neighbours.asking_rewards import FAST, GOOD, endpoint, request, score_once


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
async def test_score_tries_again_when_the_service_is_busy(server: ScriptedServer, status: int) -> None:
    url = server.script(f"busy{status}", Answer("busy", status), Answer("busy", status), Answer("busy", status), GOOD)
    async with RewardClient([endpoint(url)], "sum", policy=FAST) as client:
        assert (await client.score(request())).reward == 0.5
        assert client.stats["math"].retries == 3


async def test_score_gives_up_after_four_attempts(server: ScriptedServer) -> None:
    url = server.script("down", Answer("down", 503))
    with pytest.raises(NeighbourError) as error:
        await score_once(endpoint(url), policy=replace(FAST, breaker_after_s=60.0, overall_timeout_s=60.0))
    assert error.value.boundary == "reward:math"
    assert error.value.detail.startswith(f'{url} answered 503: "down" (4 attempts in ')
    assert len(server.received["down"]) == 4


async def test_score_gives_up_after_four_attempts_whatever_each_failed_by(server: ScriptedServer) -> None:
    url = server.script("mixed", *(Answer("down", status) for status in (503, 502, 504, 408)), GOOD)
    with pytest.raises(NeighbourError, match=r'answered 408: "down" \(4 attempts in '):
        # The breaker opens by the clock, which a busy machine's attempts may outlast.
        await score_once(endpoint(url), policy=replace(FAST, breaker_after_s=60.0, overall_timeout_s=60.0))


async def test_score_tries_a_500_once_more_only(server: ScriptedServer) -> None:
    assert (await score_once(endpoint(server.script("flaky", Answer("oops", 500), GOOD)))).reward == 0.5
    with pytest.raises(NeighbourError, match=r'answered 500: "oops" \(2 attempts in '):
        await score_once(endpoint(server.script("broken", Answer("oops", 500))))
    assert len(server.received["broken"]) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 301])
async def test_score_fails_at_once_on_other_statuses_with_the_first_500_characters(
    server: ScriptedServer, status: int
) -> None:
    url = server.script(f"refused{status}", Answer(b"x" * 499 + b"yz", status))
    with pytest.raises(NeighbourError, match=rf"answered {status}: x{{499}}y \(1 attempt in "):
        await score_once(endpoint(url))
    assert len(server.received[f"refused{status}"]) == 1


async def test_score_names_where_a_service_redirects_to_and_does_not_go_there(server: ScriptedServer) -> None:
    target = server.script("target", GOOD)
    url = server.script("moved", Answer("", 307, headers={"location": target}))
    with pytest.raises(NeighbourError, match=rf"answered 307: redirected to '{target}', which is not followed. Give "):
        await score_once(endpoint(url))
    assert len(server.received["target"]) == 0


async def test_score_waits_as_long_as_the_service_asks(server: ScriptedServer) -> None:
    url = server.script("later", Answer("busy", 503, headers={"retry-after": "0.4"}), GOOD)
    started = time.monotonic()
    assert (await score_once(endpoint(url))).reward == 0.5
    assert time.monotonic() - started > 0.4


async def test_score_waits_no_longer_than_the_policys_cap(server: ScriptedServer) -> None:
    url = server.script("much_later", Answer("busy", 429, headers={"retry-after": "3600"}), GOOD)
    assert (await score_once(endpoint(url), policy=replace(FAST, max_retry_after_s=0.1))).reward == 0.5


async def test_score_bounds_each_attempt(server: ScriptedServer) -> None:
    url = server.script("slow", Answer({"rewards": [1]}, delay_s=2.0), GOOD)
    assert (await score_once(endpoint(url, timeout_s=0.5))).reward == 0.5


async def test_score_bounds_all_attempts_together(server: ScriptedServer) -> None:
    url = server.script("slower", Answer({"rewards": [1]}, delay_s=1.0))
    started = time.monotonic()
    with pytest.raises(NeighbourError, match=r"no reward within 0.6 s over all attempts"):
        await score_once(endpoint(url, timeout_s=0.2), policy=replace(FAST, overall_timeout_s=0.1, max_attempts=50))
    assert time.monotonic() - started < 10.0  # 50 attempts would take that long


async def test_score_names_an_endpoint_where_nothing_listens() -> None:
    url = free_address()
    with pytest.raises(NeighbourError) as error:
        await score_once(endpoint(url, "style"))
    assert error.value.boundary == "reward:style"
    assert error.value.detail.startswith(f"{url}/: no connection (Connect call failed (")
    assert " (4 attempts in " in error.value.detail


async def test_score_survives_a_service_that_is_down_for_a_while() -> None:
    """The breaker opens, calls wait for it, and none is lost once the service is back on its address."""
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
        async with RewardClient(endpoints, combine, policy=policy) as client:
            assert client.is_accepting
            calls = [asyncio.create_task(client.score(request(f"p{i}"))) for i in range(50)]
            async with asyncio.timeout(20.0):
                while not all(client.stats[name].retries for name in ("a", "b")) or client.is_accepting is not expected:
                    await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


async def test_score_of_a_shard_that_is_down_is_asked_of_another(server: ScriptedServer) -> None:
    endpoints = [endpoint(free_address(), "a"), endpoint(server.script("shard_up", GOOD), "b")]
    policy = replace(FAST, breaker_threshold=1, breaker_after_s=0.0, breaker_cooldown_s=60.0)
    async with RewardClient(endpoints, "shard", policy=policy) as client:
        scores = await asyncio.gather(*(client.score(request(f"p{i}")) for i in range(20)))
    assert {tuple(score.parts) for score in scores} == {("b",)}


async def test_score_waits_through_an_outage_longer_than_its_deadline(server: ScriptedServer) -> None:
    up_at = time.monotonic() + 1.5

    def answer(_: Received) -> Answer:
        return GOOD if time.monotonic() > up_at else Answer("down", 503)

    url = server.script_by("outage", answer)
    policy = replace(FAST, overall_timeout_s=0.3, breaker_after_s=0.0, breaker_cooldown_s=0.05)
    policy = replace(policy, breaker_max_cooldown_s=0.2)
    async with RewardClient([endpoint(url, timeout_s=0.4)], "sum", policy=policy) as client:  # 1.2 s in all
        scores = await asyncio.gather(*(client.score(request(f"p{i}")) for i in range(10)))
        stats = client.stats["math"]
    assert [score.reward for score in scores] == [0.5] * 10
    assert stats.failures == 0
    assert len(server.received["outage"]) < 10 + 9 + 10 + 10  # ten at once, one every 0.2 s, ten at the end


async def test_score_does_not_give_up_because_the_service_fails_others_too(server: ScriptedServer) -> None:
    """Every sample meets a busy service five times, which is once more than a call has attempts."""
    counts: dict[str, int] = {}

    def answer(received: Received) -> Answer:
        key = received.headers["idempotency-key"]
        counts[key] = counts.get(key, 0) + 1
        return GOOD if counts[key] > 5 else Answer("busy", 503)

    url = server.script_by("unreliable", answer)
    async with RewardClient([endpoint(url)], "sum", policy=FAST) as client:
        first = await asyncio.gather(*(client.score(request(f"p{i}")) for i in range(40)))
    assert [score.reward for score in first] == [0.5] * 40


async def test_score_tries_a_500_one_time_more_of_a_service_that_often_is_not_there(server: ScriptedServer) -> None:
    counts: Counter[str] = Counter()

    def answer(received: Received) -> Answer:
        key = received.headers["idempotency-key"]
        counts[key] += 1
        if key.startswith("broken") and counts[key] < 3:
            return Answer("oops", 500)
        return Answer("busy", 503) if key.startswith("busy") and counts[key] == 1 else GOOD

    url = server.script_by("often_not_there", answer)
    async with RewardClient([endpoint(url)], "sum", policy=FAST) as client:
        await asyncio.gather(*(client.score(request(f"busy{i}")) for i in range(16)))
        assert (await client.score(request("broken"))).reward == 0.5
        await asyncio.gather(*(client.score(request(f"sound{i}")) for i in range(32)))
        with pytest.raises(NeighbourError, match=r'answered 500: "oops" \(2 attempts in '):
            await client.score(request("broken_again"))
