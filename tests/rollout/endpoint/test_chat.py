"""Agents with OpenAI's own client: what they are answered, and that the trajectory is what the engine wrote."""

import itertools
import json
from typing import Any

import pytest
from openai import BadRequestError

from tests.fakes.rollout_fakes import ScriptedScorer
from tests.rollout.endpoint.agents_scene import MESSAGES, agents_scene, taken

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
ADDS = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'


async def test_conversation_of_an_agent_is_the_tokens_that_the_engine_read_and_wrote() -> None:
    answers = itertools.cycle(["it is 4<|im_end|>", "yes, 4<|im_end|>"])
    scorer = ScriptedScorer(0.5)
    async with agents_scene(lambda context: next(answers), scorer=scorer) as scene:
        scene.coordinator.lease("g", prompt="2+2=", label="4", columns={"level": 1})
        told = await scene.take()
        assert (told["prompt"], told["label"], told["columns"]) == ("2+2=", "4", {"level": 1})
        async with scene.client(told) as client:
            messages: list[Any] = [{"role": "user", "content": told["prompt"]}]
            first = await client.chat.completions.create(model="any", messages=messages)
            assert first.choices[0].message.content == "it is 4"
            assert first.choices[0].finish_reason == "stop"
            messages += [first.choices[0].message, {"role": "user", "content": "sure?"}]
            second = await client.chat.completions.create(model="any", messages=messages)
            assert second.choices[0].message.content == "yes, 4"
        assert (await scene.end(told, "reward", reward=0.25)).json()["counted"]
        trajectory = await scene.trajectory("g")

    (before, turn), (between, last) = scene.engine.wrote
    assert trajectory.tokens.tolist() == between + last
    assert between[: len(before) + len(turn)] == before + turn
    assert [int(t) for t, is_own in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if is_own] == turn + last
    assert "sure?" in scene.engine.decode(between)
    assert (trajectory.facts.reward, trajectory.facts.num_turns, trajectory.facts.finish) == (0.75, 2, "stop")
    (scored,) = scorer.requests
    assert scored.prompt == scene.engine.decode(before)
    assert scored.response == scene.engine.decode((between + last)[len(before) :])
    assert trajectory.facts.reward_parts == {"fake": 0.5, "environment": 0.25}
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(before), len(turn))


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_agent_is_given_calls_of_tools_and_their_results_go_on_behind_them(is_streamed: bool) -> None:
    async with taken(lambda context: "4<|im_end|>" if "tool_response" in context else "So " + ADDS) as (scene, told, _):
        messages: list[Any] = [{"role": "user", "content": "2+2"}]
        async with scene.client(told) as client:
            if is_streamed:
                async with client.chat.completions.stream(model="m", messages=messages, tools=[ADD]) as stream:
                    completion: Any = await stream.get_final_completion()
            else:
                completion = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
            choice = completion.choices[0]
            (call,) = choice.message.tool_calls
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So")
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 2})
            # As agents write it that keep no more than they need, arguments in their own way.
            again = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"b":2, "a":2}'}}
            messages += [
                {"role": "assistant", "content": "So", "tool_calls": [again]},
                {"role": "tool", "tool_call_id": call.id, "content": "four <|im_end|>"},
            ]
            last = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
            assert last.choices[0].message.content == "4"
        trajectory = await scene.rewarded(told)

    assert trajectory.facts.num_turns == 2
    (before, turn), (between, last_turn) = scene.engine.wrote
    assert trajectory.tokens.tolist() == between + last_turn
    reply = scene.engine.decode(between[len(before) + len(turn) :])
    assert reply.startswith("\n<|im_start|>user\n<tool_response>\nfour <|im_end|>\n</tool_response><|im_end|>")
    end = scene.engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    # The name that the tool wrote is letters, and only the template's own ends are tokens.
    assert between[len(before) + len(turn) :].count(end) == 1


async def test_results_name_the_ids_that_a_policy_gave_to_its_calls() -> None:
    """Mistral's models write an id with each call, and may write the same one twice: the agent gets ids of its own."""
    add = '{{"name": "add", "arguments": {{"a": 2, "b": {}}}, "id": "VvvODy9mT"}}'
    turns = iter([f"[TOOL_CALLS] [{add.format(1)}, {add.format(2)}]</s>", "4</s>", "4</s>"])
    async with taken(lambda context: next(turns), family="mistral") as (scene, told, client):
        messages: list[Any] = [{"role": "user", "content": "2+2"}]
        turn = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        calls = turn.choices[0].message.tool_calls
        assert len({call.id for call in calls or ()}) == 2
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls or ()]
        again: Any = [*messages, turn.choices[0].message, *results]
        await client.chat.completions.create(model="m", messages=again, tools=[ADD])
        again[0] = {"role": "user", "content": "2 + 2"}  # another conversation
        await client.chat.completions.create(model="m", messages=again, tools=[ADD])
        await scene.rewarded(told)
    result = '[TOOL_RESULTS] {"content": 3, "call_id": "VvvODy9mT"}[/TOOL_RESULTS]'
    for before, _ in scene.engine.wrote[1:]:
        assert scene.engine.decode(before).endswith(2 * result)


async def test_history_that_was_changed_is_another_conversation_and_the_last_answered_is_trained() -> None:
    numbers = itertools.count(1)
    async with taken(lambda context: f"n{next(numbers)}<|im_end|>") as (scene, told, client):
        messages: list[Any] = [{"role": "user", "content": "a"}]
        for _ in range(2):
            turn = await client.chat.completions.create(model="m", messages=messages)
            messages += [turn.choices[0].message, {"role": "user", "content": "b"}]
        # Behind the first turn something else is said: its tokens are kept.
        await client.chat.completions.create(model="m", messages=[*messages[:2], {"role": "user", "content": "other"}])
        trajectory = await scene.rewarded(told)
    first, _, third = scene.engine.wrote
    assert trajectory.tokens.tolist() == third[0] + third[1]
    assert third[0][: len(first[0]) + len(first[1])] == first[0] + first[1]
    assert trajectory.facts.num_turns == 2
    assert trajectory.facts.reward_logs["environment/dropped_conversations"] == 1.0


@pytest.mark.parametrize("chosen", [0, 1])
async def test_agent_that_drew_two_turns_continues_the_one_that_it_sends_back(chosen: int) -> None:
    """In code, white space alone may tell the two apart."""
    texts = ["if x:\n  a()\n  b()", "if x:\n  a()\nb()"]
    turns = iter([*texts, "ok"])
    async with taken(lambda context: next(turns) + "<|im_end|>") as (scene, told, client):
        messages: list[Any] = [{"role": "user", "content": "code?"}]
        drawn = [await client.chat.completions.create(model="m", messages=messages) for _ in texts]
        assert [turn.choices[0].message.content for turn in drawn] == texts
        again = [*messages, drawn[chosen].choices[0].message, {"role": "user", "content": "it ran"}]
        await client.chat.completions.create(model="m", messages=again)
        trajectory = await scene.rewarded(told)
    (_, turn), (before, last) = scene.engine.wrote[chosen], scene.engine.wrote[-1]
    assert trajectory.tokens.tolist() == before + last
    assert [int(t) for t, is_own in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if is_own] == turn + last


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.2}, "rollout.temperature = 1"),
    ({"top_p": 0.9}, "top_p = 0.9 draws from another distribution"),
    ({"presence_penalty": 1.0}, "every ratio would be wrong"),
    ({"n": 2}, "n = 2 is not supported here"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [ADD], "tool_choice": "some"}, "expected auto, none, required or a named tool"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "a named tool. Send the allowed tools alone"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0] is the result of a tool without tool_call_id"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type = 'custom' is not supported here"),
    ({"tools": [ADD, {"type": "function", "name": "a"}]}, "tools[1] is not {type, function: {name, parameters}} with"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": [1]}}}]},
        "the JSON schema",
    ),
    ({"extra_body": {"chat_template_kwargs": {"thinking": True}}}, "is not a variable of this model's chat template"),
    ({"extra_body": {"guided_json": {}}}, "guided_json is not known here"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role is 'king'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "has a part of the type 'image_url'"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "maximum context length is 4096 tokens"),
]


async def test_what_cannot_be_trained_or_answered_is_refused_with_the_reason_and_the_session_goes_on() -> None:
    async with taken() as (scene, told, client):
        for option, reason in REFUSED:
            request = {"model": "m", "messages": [{"role": "user", "content": "a"}], **option}
            with pytest.raises(BadRequestError) as refused:
                await client.chat.completions.create(**request)
            assert reason in str(refused.value)
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        assert (await scene.rewarded(told)).facts.num_turns == 1


async def test_other_sampling_is_ignored_where_the_settings_say_so() -> None:
    async with taken(agents={"other_sampling": "ignore"}) as (scene, _, client):
        messages: Any = [{"role": "user", "content": "a"}]
        await client.chat.completions.create(model="m", messages=messages, temperature=0.2, top_p=0.5)
    (asked,) = scene.engine.asked
    assert (asked.temperature, asked.top_p) == (1.0, 1.0)


async def test_agent_may_ask_for_fewer_tokens_and_for_stop_strings() -> None:
    async with taken() as (scene, _, client):
        messages: Any = [{"role": "user", "content": "a"}]
        cut = await client.chat.completions.create(model="m", messages=messages, max_tokens=2, stop=["u"])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("fo", "length")
    assert (scene.engine.asked[0].max_tokens, scene.engine.asked[0].stop) == (2, ("u",))


async def test_context_that_is_full_ends_the_turn_and_the_trajectory() -> None:
    async with taken(lambda context: "x" * 500, max_context_tokens=100, max_response_tokens=90) as (
        scene,
        told,
        client,
    ):
        turn = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        assert turn.choices[0].finish_reason == "length"
        trajectory = await scene.rewarded(told)
    assert (len(trajectory.tokens), trajectory.facts.finish) == (100, "context")


@pytest.mark.parametrize(("shortens", "finish"), [(True, "stop"), (False, "context")])
async def test_only_the_trained_conversation_counts_as_out_of_room(shortens: bool, finish: str) -> None:
    """Strands shortens its history after such a refusal, and goes on to an answer."""
    async with taken() as (scene, told, client):
        history: list[Any] = [{"role": "user", "content": "a"}]
        turn = await client.chat.completions.create(model="m", messages=history)
        history += [turn.choices[0].message, {"role": "user", "content": "x" * 5000}]
        with pytest.raises(BadRequestError, match="maximum context length"):
            await client.chat.completions.create(model="m", messages=history)
        if shortens:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "in short"}])
        assert (await scene.rewarded(told)).facts.finish == finish


async def test_parts_of_a_content_become_lines() -> None:
    async with taken() as (scene, _, client):
        parts: Any = [{"type": "text", "text": "one file:"}, {"type": "text", "text": "a.py"}]
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": parts}])
    assert "user\none file:\na.py<|im_end|>" in scene.engine.decode(scene.engine.wrote[0][0])


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
        assert (await scene.rewarded(told)).facts.num_turns == 2


async def test_streamed_text_and_calls_come_in_pieces_of_their_own() -> None:
    """AutoGen reads no calls from a piece that has a text."""
    async with taken(lambda context: "So " + ADDS) as (_, _, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, tools=[ADD], stream=True)
        text, calls, end = [each.choices[0] async for each in stream]
    assert (text.delta.content, text.delta.tool_calls) == ("So", None)
    assert (calls.delta.content, len(calls.delta.tool_calls or ())) == (None, 1)
    assert end.finish_reason == "tool_calls"


BOOK = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "seats": {"type": "integer"},
                "window": {"type": "boolean"},
                "days": {"type": "array"},
                "who": {"type": "string"},
            },
        },
    },
}
BOOKS = """<tool_call>
<function=book>
<parameter=seats>
2
</parameter>
<parameter=window>
false
</parameter>
<parameter=days>
["mon", "tue"]
</parameter>
<parameter=who>
7
</parameter>
<parameter=other>
1
</parameter>
</function>
</tool_call><|im_end|>"""


@pytest.mark.parametrize("tool_choice", ["auto", "required", {"type": "function", "function": {"name": "book"}}])
async def test_arguments_have_the_types_of_the_requests_tools(tool_choice: Any) -> None:
    async with taken(lambda context: BOOKS, family="qwen3_coder") as (_, _, client):
        messages: Any = [{"role": "user", "content": "a"}]
        asked: Any = {"tools": [BOOK], "tool_choice": tool_choice}
        turn = await client.chat.completions.create(model="m", messages=messages, **asked)
    (call,) = turn.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {
        "seats": 2, "window": False, "days": ["mon", "tue"], "who": "7", "other": "1",
    }  # fmt: skip


THOUGHT = "<think>\nhm\n</think>\n\n"
CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 2}'}}


@pytest.mark.parametrize(
    ("written", "echo"),
    [
        (f"{THOUGHT}2 + 2 = 4<|im_end|>", {"content": "<think>hm</think> 2 + 2\n= 4"}),
        (f"{THOUGHT}2 + 2 = 4<|im_end|>", {"content": "2 + 2 = 4", "reasoning_content": "hm"}),
        ("I add. " + ADDS.replace("2,", "2.0,"), {"content": None, "tool_calls": [CALLED]}),
    ],
)
async def test_turn_that_comes_back_in_the_clients_own_form_keeps_its_tokens(
    written: str, echo: dict[str, Any]
) -> None:
    turns = iter([written, "yes<|im_end|>"])
    async with taken(lambda context: next(turns)) as (scene, told, client):
        history: Any = [{"role": "user", "content": "a"}]
        await client.chat.completions.create(model="m", messages=history, tools=[ADD])
        history += [{"role": "assistant", **echo}, {"role": "user", "content": "sure?"}]
        await client.chat.completions.create(model="m", messages=history, tools=[ADD])
        assert (await scene.rewarded(told)).facts.num_turns == 2
    (_, turn), (between, _) = scene.engine.wrote
    assert scene.engine.decode(turn) in scene.engine.decode(between)


@pytest.mark.parametrize(("of_run", "of_request"), [(False, None), (True, False)])
async def test_variables_of_the_chat_template_come_from_the_run_or_the_request(
    of_run: bool, of_request: bool | None
) -> None:
    more = {} if of_request is None else {"chat_template_kwargs": {"enable_thinking": of_request}}
    async with taken(chat_template_kwargs={"enable_thinking": of_run}) as (scene, _, client):
        messages: Any = [{"role": "user", "content": "a"}]
        await client.chat.completions.create(model="m", messages=messages, extra_body=more)
    assert scene.engine.decode(scene.engine.wrote[0][0]).endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("system", "tools"), [("Be brief. 10:01", [ADD]), ("Be brief. 10:00", []), ("Be brief. 10:00", [ADD])]
)
async def test_turn_that_comes_back_behind_another_system_message_or_with_other_tools_is_counted(
    system: str, tools: list[Any]
) -> None:
    turns = iter(["I add. " + ADDS, "4<|im_end|>", "sure<|im_end|>"])
    async with taken(lambda context: next(turns)) as (scene, told, client):
        history: list[Any] = [{"role": "system", "content": "Be brief. 10:00"}, {"role": "user", "content": "a"}]
        turn = await client.chat.completions.create(model="m", messages=history, tools=[ADD])
        call = turn.choices[0].message
        assert call.tool_calls
        history += [call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "4"}]
        history[0] = {"role": "system", "content": system}
        turn = await client.chat.completions.create(model="m", messages=history, tools=tools)
        history += [turn.choices[0].message, {"role": "user", "content": "sure?"}]
        await client.chat.completions.create(model="m", messages=history, tools=tools)
        facts = (await scene.rewarded(told)).facts
    is_changed = (system, tools) != ("Be brief. 10:00", [ADD])
    assert facts.num_turns == (2 if is_changed else 3)
    assert facts.reward_logs.get("environment/changed_turns", 0.0) == float(is_changed)


async def test_turn_that_comes_back_in_other_words_is_counted() -> None:
    async with taken() as (scene, told, client):
        history: list[Any] = [{"role": "user", "content": "a"}]
        await client.chat.completions.create(model="m", messages=history)
        await client.chat.completions.create(model="m", messages=history)  # another draw, not a change
        history += [{"role": "assistant", "content": "four\nCalling tools: []"}, {"role": "user", "content": "4"}]
        await client.chat.completions.create(model="m", messages=history)
        facts = (await scene.rewarded(told)).facts
    assert facts.reward_logs["environment/changed_turns"] == 1.0


async def test_turn_that_comes_back_behind_a_trimmed_history_is_counted() -> None:
    turns = iter(["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"])
    async with taken(lambda context: next(turns)) as (scene, told, client):
        history: list[Any] = [{"role": "user", "content": "a"}]
        for question in "bc":
            turn = await client.chat.completions.create(model="m", messages=history)
            history += [turn.choices[0].message, {"role": "user", "content": question}]
        await client.chat.completions.create(model="m", messages=history[-3:])  # as of LangGraph's trim_messages
        facts = (await scene.rewarded(told)).facts
    assert facts.num_turns == 1
    assert facts.reward_logs["environment/changed_turns"] == 1.0
