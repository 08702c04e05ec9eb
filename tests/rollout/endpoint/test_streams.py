"""Streams whose turn takes long: a sign of life, then turn or error; who hangs up and asks again is given that turn."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import APIError

from protocol.errors import NeighbourError
from rollout.endpoint.answering import AnswerForm, answer
from rollout.endpoint.answers import chat_answer
from rollout.endpoint.retries import RequestId, Retries
from tests.rollout.endpoint.agents_scene import AgentsScene, agents_scene, taken
from tests.rollout.endpoint.test_chat import ADD, ADDS


def _asks(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True}


async def _streamed(scene: AgentsScene, told: dict[str, Any], text: str) -> httpx.Response:
    """Return the reply to a request for a stream, once it has begun."""
    headers = {"Authorization": f"Bearer {told['api_key']}"}
    request = scene.http.build_request("POST", "/v1/chat/completions", json=_asks(text), headers=headers)
    return await scene.http.send(request, stream=True)


async def _data(lines: AsyncIterator[str]) -> tuple[str, list[str]]:
    """Return a stream's text, and its events that are not JSON."""
    events = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event.startswith("{")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas), [event for event in events if event[0] != "{"]


async def _noticed(scene: AgentsScene, told: dict[str, Any]) -> None:
    """Return once the server has noticed that a session's client has hung up."""
    retries = scene.player.sessions._by_id[told["id"]].retries
    async with asyncio.timeout(30.0):
        while any(each.num_waiting for each in retries.all()):
            await asyncio.sleep(0.01)


async def test_slow_streams_live_and_end_with_their_turn_or_its_error() -> None:
    def write(context: str) -> str:
        if "fails" in context:
            raise NeighbourError("engine", "is on fire")
        return f"{context[-40:].count('?')}<|im_end|>"

    async def failing(told: dict[str, Any]) -> str:
        async with scene.client(told) as client:
            body = {**_asks("fails"), "timeout": 60.0}
            with pytest.raises(APIError) as failed:
                async for _ in await client.chat.completions.create(**body):
                    pass
            return str(failed.value)

    async with agents_scene(write) as scene:
        told = []
        for name in ("fails", "waits", "leaves"):
            scene.coordinator.lease(name)
            told.append(await scene.take())
        scene.engine.may_write.clear()
        failed = asyncio.create_task(failing(told[0]))
        waits, leaves = await asyncio.gather(_streamed(scene, told[1], "?"), _streamed(scene, told[2], "??"))
        lines = waits.aiter_lines()
        assert await anext(lines) == await anext(leaves.aiter_lines()) == ": the policy writes"
        await leaves.aclose()
        await _noticed(scene, told[2])
        scene.engine.may_write.set()
        assert await _data(lines) == ("1", ["[DONE]"])
        again = await _streamed(scene, told[2], "??")
        assert await _data(again.aiter_lines()) == ("2", ["[DONE]"])
        assert len(scene.engine.asked) == 3
        assert "engine: is on fire" in await failed
        for each in told[1:]:
            await scene.end(each, "reward", reward=1.0)
        assert await scene.failure("fails") == "engine: is on fire"
        for name in ("waits", "leaves"):
            assert (await scene.trajectory(name)).facts.num_turns == 1


async def test_calls_of_a_streamed_turn_come_in_order_with_the_tokens_used() -> None:
    calls = ADDS.replace("<|im_end|>", "") + ADDS.replace('"b": 2', '"b": 3')
    async with taken(lambda context: "5<|im_end|>" if "tool_response" in context else calls) as (scene, told, _):
        messages: list[Any] = [{"role": "user", "content": "2+2, 2+3"}]
        asked: dict[str, Any] = {"messages": messages, "tools": [ADD], "stream_options": {"include_usage": True}}
        async with scene.client(told) as client:
            stream = await client.chat.completions.create(model="m", stream=True, **asked)
            first, end, usage = [each async for each in stream]
            delta = first.choices[0].delta
            assert [call.index for call in delta.tool_calls] == [0, 1]
            arguments = [json.loads(call.function.arguments) for call in delta.tool_calls]
            assert arguments == [{"a": 2, "b": 2}, {"a": 2, "b": 3}]
            assert (delta.content, end.choices[0].finish_reason, usage.choices) == (None, "tool_calls", [])
            assert usage.usage.completion_tokens == len(scene.engine.wrote[0][1])
            made = [call.model_dump(exclude={"index"}) for call in delta.tool_calls]
            messages += [{"role": "assistant", "content": None, "tool_calls": made}]
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in made]
            stream = await client.chat.completions.create(model="m", stream=True, **asked)
            last = [each async for each in stream]
            assert last[0].choices[0].delta.content == "5"
        await scene.end(told, "reward", reward=1.0)
        assert (await scene.trajectory("g")).facts.num_turns == 2


async def test_events_have_no_fields_but_openais() -> None:
    async with taken(lambda context: "5<|im_end|>") as (scene, told, _):
        reply = await _streamed(scene, told, "2+3")
        events = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line.startswith("data: {")]
        first, last = (json.loads(event) for event in events)
        assert first.keys() == last.keys() == {"id", "object", "created", "model", "choices", "system_fingerprint"}
        assert first["object"] == "chat.completion.chunk"
        choice = {"index": 0, "logprobs": None}
        assert first["choices"] == [{**choice, "delta": {"role": "assistant", "content": "5"}, "finish_reason": None}]
        assert last["choices"] == [{**choice, "delta": {}, "finish_reason": "stop"}]
        await scene.end(told, "reward", reward=1.0)


async def test_equal_request_that_comes_before_a_stream_has_begun_is_a_draw_of_its_own() -> None:
    async def turn(*_: Any) -> Any:
        return SimpleNamespace()

    async def receive() -> Any:
        await asyncio.Event().wait()

    retries, sent = Retries(), RequestId(b"body", None, is_retry=False)
    session: Any = SimpleNamespace(retries=retries, turn=turn, end=None, mark_sent=lambda reply: None)
    form = AnswerForm(chat_answer, lambda *_: iter(()))
    request: Any = SimpleNamespace(receive=receive)
    turn_request: Any = SimpleNamespace(body=SimpleNamespace(stream=True))
    response = await answer(request, session, turn_request, sent, form)
    (first,) = retries.all()
    assert retries.begin(sent, turn) is not first

    async def hung_up() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    await response({"type": "http", "asgi": {"spec_version": "2.3"}}, hung_up, send)
    assert first.num_waiting == 0
