"""A run's reward services are changed while samples are being scored: real servers, one of them slow or down."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.settings.reward_sets import RewardSet, new_set
from protocol.settings.rewards import RewardEndpoint, RewardsSettings
from rollout.neighbours.http.retries import HttpPolicy
from rollout.neighbours.reward_client import RewardClient, ScoreRequest
from rollout.neighbours.served_rewards import ServedRewards
from tests.fakes.http_servers import Answer, ScriptedServer, free_address, scripted_server

# The breaker opens by the third failure in a row, and stays open.
PATIENT = HttpPolicy(
    min_backoff_s=0.005,
    max_backoff_s=0.02,
    breaker_after_s=0.0,
    breaker_cooldown_s=600.0,
    breaker_max_cooldown_s=600.0,
)
REQUEST = ScoreRequest(key="p1/0", prompt="What? ", response="That.", label="That")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


def open_client(rewards: RewardSet | RewardsSettings) -> RewardClient:
    return RewardClient(rewards.endpoints, rewards.combine, policy=PATIENT)


def settings(url: str, **more: Any) -> RewardsSettings:
    endpoint = RewardEndpoint.model_validate({"name": "math", "url": url, **more})
    return RewardsSettings(endpoints=[endpoint])


def served(url: str) -> ServedRewards:
    return ServedRewards(1, open_client(settings(url)), open_client)


def scoring(url: str, number: int = 2, **more: Any) -> str:
    return new_set(settings(url, **more), number, "command").model_dump_json()


async def until_asked(server: ScriptedServer, name: str) -> None:
    async with asyncio.timeout(30.0):
        while not server.received[name]:
            await asyncio.sleep(0.005)


async def test_what_finishes_after_the_change_is_scored_by_the_new_set(server: ScriptedServer) -> None:
    async with served(server.script("old", Answer({"rewards": [0.0]}))) as rewards:
        before = await rewards.score(REQUEST)
        rewards.use(2, scoring(server.script("new", Answer({"rewards": [1.0]}))))
        after = await rewards.score(REQUEST)
    assert [(one.reward, one.reward_set) for one in (before, after)] == [(0.0, 1), (1.0, 2)]


async def test_what_is_being_scored_gets_its_answer_from_the_set_that_was_asked(server: ScriptedServer) -> None:
    async with served(server.script("old", Answer({"rewards": [0.0]}, delay_s=0.3))) as rewards:
        under_way = asyncio.create_task(rewards.score(REQUEST))
        await until_asked(server, "old")
        rewards.use(2, scoring(server.script("new", Answer({"rewards": [1.0]}))))
        assert (rewards.number, (await under_way).reward_set) == (2, 1)


async def test_what_waits_for_an_endpoint_that_is_down_is_scored_by_the_new_set(server: ScriptedServer) -> None:
    async with served(free_address()) as rewards:
        under_way = asyncio.create_task(rewards.score(REQUEST))
        async with asyncio.timeout(30.0):
            while rewards.is_accepting:
                await asyncio.sleep(0.01)
        rewards.use(2, scoring(server.script("new", Answer({"rewards": [1.0]}))))
        async with asyncio.timeout(30.0):
            assert (await under_way).reward_set == 2
        assert rewards.is_accepting


async def test_what_the_earlier_set_fails_meanwhile_is_scored_by_the_new_set(server: ScriptedServer) -> None:
    async with served(server.script("old", Answer("no", 400, delay_s=0.3))) as rewards:
        under_way = asyncio.create_task(rewards.score(REQUEST))
        await until_asked(server, "old")
        rewards.use(2, scoring(server.script("new", Answer({"rewards": [1.0]}))))
        assert (await under_way).reward_set == 2


async def test_a_set_that_cannot_be_used_is_told_in_words_and_nothing_new_is_accepted(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    url = server.script("new", Answer({"rewards": [1.0]}))
    async with served(server.script("old", Answer({"rewards": [0.0]}))) as rewards:
        rewards.use(2, scoring(url, headers_env={"X-Key": "NOT_SET_HERE"}))
        assert (rewards.number, rewards.is_accepting) == (1, False)
        assert rewards.problem is not None
        assert "the header X-Key comes from the environment variable NOT_SET_HERE, which is not set" in rewards.problem
        assert (await rewards.score(REQUEST)).reward_set == 1  # what is under way is finished
        rewards.use(3, scoring(url, 3))
        assert (rewards.number, rewards.is_accepting, rewards.problem) == (3, True, None)


async def test_a_set_that_cannot_be_read_is_told_in_words(server: ScriptedServer) -> None:
    async with served(server.script("old", Answer({"rewards": [0.0]}))) as rewards:
        rewards.use(2, "{}")
        assert rewards.problem == "reward set 2 cannot be read here: Field required"


async def test_cancelling_a_sample_cancels_its_scoring(server: ScriptedServer) -> None:
    async with served(server.script("old", Answer({"rewards": [0.0]}, delay_s=600.0))) as rewards:
        under_way = asyncio.create_task(rewards.score(REQUEST))
        await until_asked(server, "old")
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way
