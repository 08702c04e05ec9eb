"""/v1/responses with OpenAI's own client: answers, streams, earlier responses, and items that cannot be read."""

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rollout.endpoint.requests import Refusal, SessionSampling
from rollout.endpoint.responses import Histories, read_responses
from rollout.endpoint.turns import call_id
from tests.rollout.endpoint.agents_scene import taken
from tests.rollout.endpoint.test_chat import ADD, ADDS

TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}


def _write(context: str) -> str:
    return "It is 4.<|im_end|>" if "tool_response" in context else "I add. " + ADDS


async def _whole(client: AsyncOpenAI, **request: Any) -> Any:
    return await client.responses.create(model="m", **request)


async def _streamed(client: AsyncOpenAI, **request: Any) -> Any:
    async with client.responses.stream(model="m", **request) as stream:
        return await stream.get_final_response()


@pytest.mark.parametrize("respond", [_whole, _streamed])
@pytest.mark.parametrize("sends", ["id", "output", "calls alone"])
async def test_output_and_results_of_calls_continue_the_conversation(respond: Any, sends: str) -> None:
    common: Any = {"tools": [TOOL], "instructions": "Be brief."}
    async with taken(_write) as (scene, told, client):
        items: list[Any] = [{"role": "user", "content": "2+2"}]
        first = await respond(client, input=items, **common)
        message, call = first.output
        assert (message.content[0].text, first.status) == ("I add.", "completed")
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 2})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "four"}
        if sends == "id":
            last = await respond(client, input=[result], previous_response_id=first.id, **common)
        else:
            output = first.output if sends == "output" else [call]
            echo = [each.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for each in output]
            last = await respond(client, input=[*items, *echo, result], **common)
        assert last.output_text == "It is 4."
        before, turn = scene.engine.wrote[1]
        assert last.usage.model_dump()["input_tokens"] == len(before)
        assert last.usage.total_tokens == len(before) + len(turn)
        trajectory = await scene.rewarded(told)
    assert trajectory.facts.num_turns == 2
    assert trajectory.tokens.tolist() == before + turn
    text = scene.engine.decode(before)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert text.count("Be brief.") == 1
    assert "<tool_response>\nfour\n</tool_response>" in text


async def test_turn_that_was_cut_is_incomplete() -> None:
    async with taken() as (_, _, client):
        response = await client.responses.create(model="m", input="2+2", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert (response.incomplete_details.reason, response.output_text) == ("max_output_tokens", "fo")


@pytest.mark.parametrize(
    ("request_fields", "reason"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type = 'item_reference' cannot be read here"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "has a part of the type 'input_image'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type = 'web_search' is not supported here"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools[0] is not {type, name, parameters} with"),
        ({"previous_response_id": "resp_other"}, "resp_other is not a response of this session"),
        ({"temperature": 0.2}, "rollout.temperature = 1"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"text": {"format": {"type": "json_object"}}}, "text = "),
        ({"conversation": "c"}, "conversation = 'c' is not supported here"),
        ({"include": ["message.output_text.logprobs"]}, "output_text.logprobs is not supported here"),
    ],
)
async def test_request_that_cannot_be_answered_is_refused_with_the_reason(
    request_fields: dict[str, Any], reason: str
) -> None:
    async with taken() as (_, _, client):
        with pytest.raises(BadRequestError) as refused:
            await client.responses.create(**{"model": "m", "input": "a", **request_fields})
    assert reason in str(refused.value)


def _read(items: list[Any]) -> list[dict[str, Any]]:
    sampling = SessionSampling(1.0, "refuse")
    _, request = read_responses(json.dumps({"input": items}).encode(), sampling, Histories())
    return [message.rendered for message in request.messages]


def test_thought_text_and_calls_of_a_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]}
    rendered = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {}}}
    said = "<think>\nhm\n</think>\n\n"
    assert _read([thought, text, call, call]) == [
        {"role": "assistant", "content": f"{said}So", "tool_calls": [rendered, rendered]}
    ]
    assert _read([thought, call]) == [{"role": "assistant", "content": said, "tool_calls": [rendered]}]
    assert _read([thought, thought, text]) == [{"role": "assistant", "content": f"{said}{said}So"}]
    assert _read([text, text]) == [{"role": "assistant", "content": "So"}] * 2


def test_results_between_the_calls_of_a_turn_follow_them() -> None:
    one, two, other = (
        {"type": "function_call", "call_id": call_id(*place), "name": "add", "arguments": "{}"}
        for place in ((7, 0), (7, 1), (8, 0))
    )
    results = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": "4"} for each in (one, two, other)
    ]
    together = _read([one, two, *results[:2], other, results[2]])
    assert _read([one, results[0], two, results[1], other, results[2]]) == together
    assert [message["role"] for message in together] == ["assistant", "tool", "tool", "assistant", "tool"]


def test_thought_without_a_text_is_no_part_of_a_later_turn() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}
    question, answer = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}
    alone = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n"}
    assert _read([question, thought, question, answer]) == [question, alone, question, answer]
    assert _read([question, thought]) == [question, alone]


def test_field_that_is_not_a_call_is_refused() -> None:
    with pytest.raises(Refusal, match="holds a call that is not"):
        _read([{"type": "function_call", "call_id": "c1"}])


@pytest.mark.parametrize("written", ["I add. " + ADDS, ADDS, "4<|im_end|>", "<|im_end|>"])
async def test_answers_are_objects_of_openais_own_types(written: str) -> None:
    async with taken(lambda context: written) as (scene, told, _):
        key = {"Authorization": f"Bearer {told['api_key']}"}
        response: dict[str, Any] = {"input": "2+2", "tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}}
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "2+2"}], "tools": [ADD]}
        for path, body, limit in (("responses", response, "output"), ("chat/completions", chat, "completion")):
            for more in ({}, {f"max_{limit}_tokens": 2}):
                whole = await scene.http.post(f"/v1/{path}", json={**body, **more}, headers=key)
                of_chat = path != "responses"
                (ChatCompletion if of_chat else Response).model_validate_json(whole.content)
                sent = await scene.http.post(f"/v1/{path}", json={**body, **more, "stream": True}, headers=key)
                events = [part.partition("data: ")[2] for part in sent.text.strip().split("\n\n")]
                for event in events[:-1] if of_chat else events:
                    TypeAdapter[Any](ChatCompletionChunk if of_chat else ResponseStreamEvent).validate_json(event)
