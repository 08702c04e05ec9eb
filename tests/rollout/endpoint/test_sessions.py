"""A sample in the hands of an agent: given out, ended once, and never lost whatever the agent does."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from protocol.errors import NeighbourError
from protocol.settings.run_spec import RunSpec
from protocol.wire import messages as m
from tests.fakes.rollout_fakes import ScriptedScorer
from tests.rollout.endpoint.agents_scene import MESSAGES, agents_scene, taken
from tests.rollout.server_stage import Stage, push


def _message(reply: httpx.Response) -> str:
    return str(reply.json()["error"]["message"])


async def test_end_that_is_reported_twice_is_told_and_counted_once() -> None:
    async with taken() as (scene, told, _):
        assert (await scene.ask(told)).status_code == 200
        assert (await scene.end(told, "reward", reward=1.0)).json()["counted"] is True
        again = await scene.end(told, "reward", reward=1.0)
        assert (again.status_code, again.json()["counted"]) == (200, False)
        for late in (await scene.end(told, "reward", reward=0.0), await scene.end(told), await scene.ask(told)):
            assert (late.status_code, _message(late)) == (410, f"session {told['id']} has ended: its end was reported")
        assert (await scene.trajectory("g")).facts.reward == 1.0


@pytest.mark.parametrize(
    ("asks", "failure"),
    [
        (False, "agent: ended without a turn of the policy: no request with its key was answered"),
        (True, "agent: gave no reward, and rewards.endpoints is empty. Report a reward, or name an endpoint"),
    ],
)
async def test_agent_that_brings_nothing_has_failed_its_sample(asks: bool, failure: str) -> None:
    async with taken() as (scene, told, _):
        if asks:
            await scene.ask(told)
        await scene.end(told)
        assert await scene.failure("g") == failure


async def test_silent_agent_has_failed_its_sample_and_is_told_so_when_it_speaks_again() -> None:
    async with taken(agents={"idle_timeout_s": 0.5}) as (scene, told, _):
        assert await scene.failure("g") == "agent: asked nothing for agents.idle_timeout_s = 0.5 s"
        for late in (await scene.ask(told), await scene.end(told, "reward", reward=1.0)):
            assert late.status_code == 410
            assert _message(late).endswith(
                "agent: asked nothing for agents.idle_timeout_s = 0.5 s. Its sample goes out again"
            )


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_agent_that_waits_for_a_turn_is_not_silent(is_streamed: bool) -> None:
    async with taken(agents={"idle_timeout_s": 0.2}) as (scene, told, _):
        scene.engine.may_write.clear()
        asking = asyncio.create_task(scene.ask(told, {"messages": MESSAGES, "stream": is_streamed}))
        await asyncio.sleep(1.0)
        scene.engine.may_write.set()
        # Unless the sample was given up before the agent's request had come, which a busy machine may make of 0.2 s.
        assert (await asking).status_code == (200 if scene.engine.asked else 410)


async def test_sample_that_is_leased_anew_ends_its_earlier_session() -> None:
    async with taken() as (scene, told, _):
        scene.engine.may_write.clear()
        asking = asyncio.create_task(scene.ask(told))
        while not scene.engine.asked:
            await asyncio.sleep(0.01)
        scene.coordinator.lease("g", attempt=2)
        newer = await scene.take()
        assert ((await asking).status_code, _message(await asking)) == (
            410,
            f"session {told['id']} has ended: its lease was taken back",
        )
        scene.engine.may_write.set()
        await scene.ask(newer)
        await scene.end(newer, "reward", reward=1.0)
        assert (await scene.trajectory("g")).facts.attempt == 2


async def test_engine_that_fails_ends_the_session_with_its_reason() -> None:
    def write(context: str) -> str:
        raise NeighbourError("engine", "is on fire")

    async with taken(write) as (scene, told, _):
        reply = await scene.ask(told)
        assert reply.status_code == 410
        assert "engine: is on fire" in _message(reply)
        assert await scene.failure("g") == "engine: is on fire"


async def test_who_has_no_key_is_refused_and_who_asks_in_vain_is_told_so() -> None:
    async with agents_scene() as scene:
        nobody = {"Authorization": "Bearer wrong"}
        body = {"model": "m", "messages": MESSAGES}
        assert (await scene.http.post("/v1/chat/completions", json=body, headers=nobody)).status_code == 401
        assert (await scene.http.post("/sluice/sessions", json={}, headers=nobody)).status_code == 401
        assert (await scene.http.post("/sluice/sessions/x/finish", headers=nobody)).status_code == 401
        assert (await scene.http.post("/sluice/sessions/x/finish")).status_code == 404
        unread = await scene.http.post("/sluice/sessions/x/reward", content=b"{" * 1000, headers=nobody)
        assert unread.status_code == 401  # before its body is read
        assert (await scene.http.post("/sluice/sessions", json={"wait_s": 0.0})).status_code == 204
        assert (await scene.http.get("/v1/none")).json()["error"]["type"] == "not_found_error"


async def test_program_that_waits_for_a_sample_gets_none_when_the_run_leaves() -> None:
    async with agents_scene() as scene:
        waiting = asyncio.create_task(scene.http.post("/sluice/sessions", json={"wait_s": 60.0}))
        while not scene.player.sessions.has_demand:
            await asyncio.sleep(0.01)
        await scene.player.close()
        assert (await waiting).status_code == 204
        assert await scene.player.sessions.take(60.0) is None


async def test_retries_make_no_second_turn() -> None:
    async with taken() as (scene, told, _):
        first = await scene.ask(told, **{"Idempotency-Key": "a"})
        assert (await scene.ask(told, **{"Idempotency-Key": "a"})).json() == first.json()
        other = await scene.ask(told, {"model": "m", "messages": [*MESSAGES, *MESSAGES]}, **{"Idempotency-Key": "a"})
        assert (other.status_code, _message(other)[:40]) == (409, "this Idempotency-Key came before with an")
        assert len(scene.engine.wrote) == 1
        # OpenAI's clients say that they try again.
        second = await scene.ask(told)
        assert (await scene.ask(told, **{"X-Stainless-Retry-Count": "1"})).json() == second.json()
        assert len(scene.engine.wrote) == 2
        # Who was answered and asks the same again has another turn drawn.
        assert (await scene.ask(told)).json()["id"] != second.json()["id"]
        assert len(scene.engine.wrote) == 3


async def test_client_that_left_and_asks_again_is_given_the_turn_that_it_asked_for() -> None:
    async with taken() as (scene, told, _):
        scene.engine.may_write.clear()
        asking = asyncio.create_task(scene.ask(told))
        while not scene.engine.asked:
            await asyncio.sleep(0.01)
        asking.cancel()
        async with asyncio.timeout(30.0):  # until the server has noticed
            while 'status="499"' not in (await scene.http.get("/metrics")).text:
                await asyncio.sleep(0.02)
        again = asyncio.create_task(scene.ask(told))
        scene.engine.may_write.set()
        assert (await again).status_code == 200
        assert len(scene.engine.asked) == 1


async def test_no_body_of_a_request_is_an_error_of_ours() -> None:
    draw = random.Random(5)
    strange: list[Any] = [None, 0, -1, 1e400, "", "x", [], {}, [[]], [None], {"a": []}, True, "\ud800", "<|im_end|>"]
    fields = ["messages", "tools", "tool_choice", "stop", "max_tokens", "stream", "logprobs", "n", "model", "user"]
    statuses = set()
    async with taken(agents={"other_sampling": "ignore"}) as (scene, told, _):
        key = {"Authorization": f"Bearer {told['api_key']}", "Content-Type": "application/json"}
        for number in range(120):
            body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            for name in draw.sample(fields, 2):
                body[name] = draw.choice(strange)
            if draw.random() < 0.3:
                body["messages"] = [{draw.choice(["role", "content", "tool_calls", "name"]): draw.choice(strange)}]
            sent = json.dumps(body)[: draw.choice([None, 20])].encode()
            reply = await scene.http.post("/v1/chat/completions", content=sent, headers=key)
            assert reply.status_code in (200, 400), (number, sent, reply.text)
            statuses.add(reply.status_code)
        assert statuses == {200, 400}
        await scene.rewarded(told)


async def test_server_opens_the_address_at_attach_and_closes_it_at_detach(stage: Stage) -> None:
    run = RunSpec.model_validate(stage.run(environment="agents"))
    described = await stage.server.attach(run.model_dump(mode="json"))
    await push(stage.server, 1)
    address = described["run"]["base_url"]
    headers = {"Authorization": f"Bearer {stage.node.token}"}
    async with httpx.AsyncClient(base_url=address.removesuffix("v1"), headers=headers, trust_env=False) as http:
        assert (await http.get("/health")).json() == {"num_sessions": 0}
        await stage.server.detach()
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


def _program(play: Callable[[AsyncOpenAI], Any]) -> Callable[[Any], Any]:
    async def program(task: Any) -> Any:
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            return await play(client)

    return program


async def test_program_plays_each_sample_and_returns_its_reward() -> None:
    async def play(client: AsyncOpenAI) -> float:
        turn = await client.chat.completions.create(model="m", messages=MESSAGES)
        return 1.0 if turn.choices[0].message.content == "four" else 0.0

    async with agents_scene(program=_program(play)) as scene:
        scene.coordinator.lease("g", num_samples=3)
        rewards = [(await scene.trajectory("g", index)).facts.reward for index in range(3)]
    assert rewards == [1.0] * 3


async def test_program_may_be_a_plain_function() -> None:
    def program(task: Any) -> float:
        headers = {"Authorization": f"Bearer {task.api_key}"}
        body = {"messages": [{"role": "user", "content": task.prompt}]}
        reply = httpx.post(f"{task.base_url}/chat/completions", json=body, headers=headers, trust_env=False, timeout=60)
        return float(len(reply.json()["choices"][0]["message"]["content"]))

    async with agents_scene(program=program) as scene:
        scene.coordinator.lease("g")
        assert (await scene.trajectory("g")).facts.reward == 4.0


async def test_reward_services_get_the_row_whatever_a_program_does_to_it() -> None:
    async def program(task: Any) -> None:
        task.columns["added"] = 1
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            await client.chat.completions.create(model="m", messages=MESSAGES)

    async with agents_scene(program=program, scorer=ScriptedScorer()) as scene:
        scene.coordinator.lease("g")
        await scene.trajectory("g")
        rewards: Any = scene.player._scorer
    assert "added" not in rewards.requests[0].columns


async def test_failed_plain_function_is_reported_with_its_line() -> None:
    def program(task: Any) -> float:
        raise ValueError("no idea")

    async with agents_scene(program=program) as scene:
        scene.coordinator.lease("g")
        failed = await scene.outcome("g")
    line = f"{__file__}:{program.__code__.co_firstlineno + 1}"
    assert isinstance(failed, m.SampleFailed)
    assert (failed.detail, failed.place) == (f"ValueError: no idea ({line})", line)


async def test_program_with_a_cancellation_of_its_own_has_failed_its_sample() -> None:
    async def play(client: AsyncOpenAI) -> float:
        raise asyncio.CancelledError

    async with agents_scene(program=_program(play)) as scene:
        scene.coordinator.lease("g")
        assert (await scene.failure("g")).startswith("agent: CancelledError: ")


async def test_program_that_raises_or_returns_no_number_has_failed_its_sample() -> None:
    endings = iter([ValueError("no idea"), "much", SystemExit(3), None])

    async def play(client: AsyncOpenAI) -> Any:
        await client.chat.completions.create(model="m", messages=MESSAGES)
        end = next(endings)
        if isinstance(end, BaseException):
            raise end
        return end

    async with agents_scene(program=_program(play)) as scene:
        failures = []
        for name in "abcd":
            scene.coordinator.lease(name)
            failures.append(await scene.failure(name))
    assert failures[0].startswith("agent: ValueError: no idea (")
    assert failures[1] == "agent: the program returned 'much', expected a number or None"
    assert failures[2].startswith("agent: SystemExit: 3 (")
    assert failures[3].startswith("agent: gave no reward")


async def test_program_that_puts_its_key_where_all_samples_read_it_has_failed_its_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two samples at a time would send turns with one key, and each reward would be for turns of both."""

    async def program(task: Any) -> float:
        monkeypatch.setenv("OPENAI_API_KEY", task.api_key)
        async with AsyncOpenAI(base_url=task.base_url) as client:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        return 1.0

    async with agents_scene(program=program) as scene:
        scene.coordinator.lease("g")
        failure = await scene.failure("g")
    assert failure.startswith("agent: a program set the environment variable OPENAI_API_KEY, which all samples read,")
