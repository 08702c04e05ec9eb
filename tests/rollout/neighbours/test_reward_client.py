"""The reward client against real servers: its requests, batches, and the combination of rewards."""

import asyncio
from dataclasses import replace

import pytest

from protocol.errors import NeighbourError, OperatorError
from rollout.neighbours.reward_client import RewardClient, Score, ScoreRequest
from tests.fakes.http_servers import Answer, Received, ScriptedServer, free_address
from tests.rollout.neighbours.asking_rewards import FAST, GOOD, endpoint, request, score_once


async def test_score_sends_the_contracts_body_and_headers(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    url = server.script("body", GOOD)
    async with RewardClient(
        [endpoint(url, headers_env={"X-Key": "MY_KEY"})], "sum", "a-token-of-the-cluster"
    ) as client:
        assert await client.score(request("p1/0 é")) == Score(0.5, {"math": 0.5})
    (received,) = server.received["body"]
    prompt = {"prompts": ["What? "], "labels": [{"target": ["That"]}], "num_turns": [1]}
    assert received.body == {"query": ["What? That."], **prompt}
    assert received.headers["idempotency-key"] == "p1/0 %C3%A9"
    assert received.headers["x-key"] == "secret"
    assert received.headers["authorization"] == "Bearer a-token-of-the-cluster"


async def test_score_combines_endpoints_by_weight(server: ScriptedServer) -> None:
    endpoints = [
        endpoint(server.script("two", Answer({"rewards": [2.0]})), "two", weight=4.0),
        endpoint(server.script("five", Answer(5)), "five", weight=-1.0),
    ]
    parts = {"two": 2.0, "five": 5.0}
    assert await score_once(*endpoints, combine="sum") == Score(3.0, parts)
    assert await score_once(*endpoints, combine="mean") == Score(1.0, parts)
    assert await score_once(*endpoints, combine="product") == Score(-40.0, parts)


async def test_score_by_shard_asks_one_endpoint_and_the_same_for_a_key(server: ScriptedServer) -> None:
    endpoints = [
        endpoint(server.script("left", Answer({"rewards": [1]})), "left"),
        endpoint(server.script("right", Answer({"rewards": [1]})), "right"),
    ]
    async with RewardClient(endpoints, "shard", policy=FAST) as client:
        first = [set((await client.score(request(f"p{i}"))).parts) for i in range(30)]
        again = [set((await client.score(request(f"p{i}"))).parts) for i in range(30)]
    assert first == again
    assert {name for parts in first for name in parts} == {"left", "right"}
    assert all(len(parts) == 1 for parts in first)


@pytest.mark.parametrize(("combine", "reward"), [("sum", 6.0), ("mean", 2.0), ("product", 6.0), ("shard", 6.0)])
async def test_endpoint_of_weight_0_is_asked_and_recorded_and_decides_nothing(
    server: ScriptedServer, combine: str, reward: float
) -> None:
    endpoints = [
        endpoint(server.script("used", Answer({"rewards": [2.0]})), "used", weight=3.0),
        endpoint(server.script("tried", Answer({"rewards": [9.0], "scores": [0.5]})), "tried", weight=0.0),
    ]
    assert await score_once(*endpoints, combine=combine) == Score(reward, {"used": 2.0, "tried": 9.0})


async def test_score_raises_when_one_of_several_endpoints_fails(server: ScriptedServer) -> None:
    endpoints = [endpoint(server.script("fine", GOOD), "fine"), endpoint(server.script("bad", Answer("x", 404)), "bad")]
    with pytest.raises(NeighbourError) as error:
        await score_once(*endpoints)
    assert error.value.boundary == "reward:bad"


async def test_score_raises_when_parts_combine_to_infinity(server: ScriptedServer) -> None:
    huge = endpoint(server.script("huge", Answer(1e18)), weight=1e300)
    with pytest.raises(NeighbourError, match="combine to inf"):
        await score_once(huge)


async def test_score_keeps_to_the_cap_on_requests_in_flight(server: ScriptedServer) -> None:
    url = server.script("capped", Answer({"rewards": [1]}, delay_s=0.02))
    async with RewardClient([endpoint(url, max_concurrency=3)], "sum", policy=FAST) as client:
        await asyncio.gather(*(client.score(request(f"p{i}")) for i in range(12)))
    assert server.most_at_once["capped"] == 3


async def test_score_does_not_count_the_queue_before_a_slow_service(server: ScriptedServer) -> None:
    url = server.script("queue", Answer({"rewards": [1]}, delay_s=0.2))
    policy = replace(FAST, overall_timeout_s=0.1)  # becomes 3 times timeout_s: 3 s, for 4 s of queue
    async with RewardClient([endpoint(url, max_concurrency=1, timeout_s=1.0)], "sum", policy=policy) as client:
        scores = await asyncio.gather(*(client.score(request(f"p{i}")) for i in range(20)))
    assert len(scores) == 20


async def test_score_gathers_batches(server: ScriptedServer) -> None:
    url = server.script_by("batch", lambda received: Answer({"rewards": received.body["labels"]}))
    async with RewardClient([endpoint(url, batch_size=4)], "sum", policy=FAST) as client:
        requests = [ScoreRequest(f"p{i}", "q", "r", label=float(i)) for i in range(10)]
        scores = await asyncio.gather(*(client.score(each) for each in requests))
    assert [score.reward for score in scores] == [float(i) for i in range(10)]
    assert sorted(len(received.body["query"]) for received in server.received["batch"]) == [2, 4, 4]


async def test_score_of_a_batch_loses_only_the_sample_that_breaks_the_function(server: ScriptedServer) -> None:
    def answer(received: Received) -> Answer:
        labels = received.body["labels"]
        return Answer("bad sample", 500) if 2 in labels else Answer({"rewards": labels})

    url = server.script_by("poison", answer)
    async with RewardClient([endpoint(url, batch_size=4)], "sum", policy=FAST) as client:
        requests = [ScoreRequest(f"p{i}", "q", "r", label=i) for i in range(4)]
        results = await asyncio.gather(*(client.score(each) for each in requests), return_exceptions=True)
    assert [result.reward if isinstance(result, Score) else type(result) for result in results] == [
        0.0,
        1.0,
        NeighbourError,
        3.0,
    ]


@pytest.mark.parametrize("status", [200, 400, 422, 500])
async def test_check_passes_an_endpoint_that_answers_a_made_up_sample(server: ScriptedServer, status: int) -> None:
    url = server.script(f"check{status}", Answer({"rewards": [0]}, status))
    async with RewardClient([endpoint(url)], "sum", policy=FAST) as client:
        await client.check()
    assert len(server.received[f"check{status}"]) == 1


@pytest.mark.parametrize("status", [401, 404, 503])
async def test_check_refuses_other_statuses(server: ScriptedServer, status: int) -> None:
    url = server.script(f"refused{status}", Answer("no", status))
    async with RewardClient([endpoint(url)], "sum", policy=FAST) as client:
        with pytest.raises(NeighbourError, match=rf'answered {status}: "no"\. Start the service, or change rewards'):
            await client.check()


RAISED = Answer({"detail": "the reward function failed on sample 1", "where": "/my.py:6"}, 500)


async def test_check_with_a_row_passes_a_service_that_scores_it_at_the_second_attempt(server: ScriptedServer) -> None:
    async with RewardClient([endpoint(server.script("second", RAISED, GOOD))], "sum", policy=FAST) as client:
        await client.check(request())
    assert [received.body["labels"] for received in server.received["second"]] == [[{"target": ["That"]}]] * 2


@pytest.mark.parametrize(
    ("answer", "place"),
    [(RAISED, "/my.py:6"), (Answer("no", 500), ""), (Answer("no", 422), ""), (Answer("no", 400), "")],
)
async def test_check_with_a_row_refuses_a_service_that_cannot_score_it(
    server: ScriptedServer, answer: Answer, place: str
) -> None:
    async with RewardClient([endpoint(server.script("fails", answer))], "sum", policy=FAST) as client:
        with pytest.raises(NeighbourError, match=r"It was asked for the first row with the response 'That\.'") as error:
            await client.check(request())
    assert error.value.place == place


async def test_function_that_raises_fails_its_samples_with_its_place_and_opens_no_breaker(
    server: ScriptedServer,
) -> None:
    policy = replace(FAST, breaker_threshold=1, breaker_after_s=0.0, breaker_cooldown_s=60.0)
    async with RewardClient([endpoint(server.script("raises", RAISED))], "sum", policy=policy) as client:
        failures = await asyncio.gather(*(client.score(request(f"p{i}")) for i in range(8)), return_exceptions=True)
        assert client.is_accepting
    assert [each.place for each in failures if isinstance(each, NeighbourError)] == ["/my.py:6"] * 8


async def test_check_names_the_endpoint_that_is_down_and_what_to_change(server: ScriptedServer) -> None:
    down = free_address()
    endpoints = [endpoint(server.script("up", GOOD), "up"), endpoint(down, "down")]
    async with RewardClient(endpoints, "sum", policy=FAST) as client:
        with pytest.raises(NeighbourError) as error:
            await client.check()
    assert str(error.value).startswith(f"reward:down: {down}/: no connection (Connect call failed (")
    assert str(error.value).endswith("). Start the service, or change rewards.endpoints (name down).")


async def test_check_refuses_an_endpoint_that_answers_nonsense(server: ScriptedServer) -> None:
    async with RewardClient([endpoint(server.script("odd", Answer({"status": "ok"})))], "sum", policy=FAST) as client:
        with pytest.raises(NeighbourError, match=r"\$\.rewards is missing; the reply has the keys \['status'\]"):
            await client.check()


def test_client_refuses_a_header_whose_variable_is_not_set() -> None:
    with pytest.raises(OperatorError, match="NOT_SET_ANYWHERE, which is not set"):
        RewardClient([endpoint("http://a/", headers_env={"X": "NOT_SET_ANYWHERE"})], "sum")


async def test_scores_are_averaged_and_logs_named_by_their_endpoint(server: ScriptedServer) -> None:
    logs = {"length": [7], "note": ["text"], "huge": 1e300, "n" * 200: 1}
    first = {"rewards": [1], "scores": [0.5], "extra_logs": logs}
    one = endpoint(server.script("logs-one", Answer(first)), "one")
    two = endpoint(server.script("logs-two", Answer({"rewards": [2], "scores": [1.0]})), "two")
    three = endpoint(server.script("logs-three", Answer({"rewards": [3]})), "three")
    score = await score_once(one, two, three)
    assert score == Score(6.0, {"one": 1.0, "two": 2.0, "three": 3.0}, 0.75, {"one/length": 7.0})


async def test_no_more_logs_are_kept_than_a_trajectory_has_room_for(server: ScriptedServer) -> None:
    logs = {f"log{number:03}": number for number in range(100)}
    score = await score_once(endpoint(server.script("many-logs", Answer({"rewards": [1], "extra_logs": logs}))))
    assert list(score.logs) == [f"math/log{number:03}" for number in range(64)]
