"""Requests that go on with a conversation: its turns keep their tokens, and the policy reads what its agent says."""

from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from protocol.wire.trajectory import Trajectory
from rollout.endpoint.messages import read_messages
from rollout.endpoint.turns import TurnRequest
from tests.rollout.endpoint.agents_scene import AgentsScene, agents_scene, taken
from tests.rollout.endpoint.test_chat import ADD, ADDS


def _writes(*turns: str) -> Callable[[str], str]:
    written = iter(turns)
    return lambda context: next(written)


async def _played(scene: AgentsScene, play: Callable[[AsyncOpenAI], Any]) -> Trajectory:
    """Return the trajectory of one sample that this plays."""
    scene.coordinator.lease("g")
    told = await scene.take()
    async with scene.client(told) as client:
        await play(client)
    return await scene.rewarded(told)


def _told(scene: AgentsScene, trajectory: Trajectory) -> str:
    """Return the trajectory as text, after seeing that all turns of the policy are trained."""
    own = [int(t) for t, is_own in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if is_own]
    assert own == [token for _, turn in scene.engine.wrote for token in turn]
    assert trajectory.facts.num_turns == len(scene.engine.wrote)
    return scene.engine.decode(trajectory.tokens.tolist())


@pytest.mark.parametrize("puts_it_back", [True, False])
async def test_chat_goes_on_behind_a_turn_whether_or_not_the_agent_puts_its_stop_string_back(
    puts_it_back: bool,
) -> None:
    async def play(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "2+2"}]
        for passage in ("four", "4"):
            turn = await client.chat.completions.create(model="m", messages=messages, stop=["</search>"])
            content = (turn.choices[0].message.content or "") + "</search>" * puts_it_back
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": passage}]
        await client.chat.completions.create(model="m", messages=messages, stop=["</search>"])

    async with agents_scene(_writes("<search>a</search>..", "<search>b</search>", "4<|im_end|>")) as scene:
        text = _told(scene, await _played(scene, play))
    assert text.count("</search>") == 2


async def test_call_in_openais_older_form_is_told_to_the_policy_as_a_call() -> None:
    function = {"name": "add", "arguments": '{"a": 2}'}
    older, newer = ({"function_call": function}, {"tool_calls": [{"id": "", "function": function}]})
    said = [read_messages([{"role": "assistant", "content": None, **form}])[0] for form in (older, newer)]
    assert said[0] == said[1]
    assert said[0].rendered["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}


async def test_chat_that_ends_with_a_turn_of_the_policy_has_it_write_another_behind_it() -> None:
    async def play(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "2+2"}]
        first = await client.chat.completions.create(model="m", messages=messages, max_tokens=3)
        await client.chat.completions.create(model="m", messages=[*messages, first.choices[0].message])

    async with agents_scene(_writes("four is", "r is it<|im_end|>")) as scene:
        text = _told(scene, await _played(scene, play))
    assert text.endswith("\nfou<|im_end|>\n<|im_start|>assistant\nr is it<|im_end|>")


@pytest.mark.parametrize("written", ["<think>\nhm\n</think>\n\n4<|im_end|>", "hm\n</think>\n\n4<|im_end|>"])
@pytest.mark.parametrize("echo", [{"content": "4"}, {"content": "4", "reasoning_content": "hm"}])
async def test_turn_keeps_its_tokens_when_its_thought_is_left_out_or_comes_apart(
    written: str, echo: dict[str, Any]
) -> None:
    """Google's ADK and Agno leave thoughts out. Some templates open the thought, so that no turn has its first tag."""

    async def play(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "2+2"}]
        await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", **echo}, {"role": "user", "content": "sure?"}]
        await client.chat.completions.create(model="m", messages=messages)

    async with agents_scene(_writes(written, "yes<|im_end|>")) as scene:
        trajectory = await _played(scene, play)
        assert "hm\n</think>" in _told(scene, trajectory)
    assert trajectory.facts.reward_logs == {}


@pytest.mark.parametrize("is_split", [True, False])
async def test_results_are_told_in_the_order_of_their_turns_calls(is_split: bool) -> None:
    """camel-ai sends each call with its result behind it; others send the results as their tools end."""
    calls = ADDS.replace("<|im_end|>", "\n") + ADDS.replace('"b": 2', '"b": 3')

    async def play(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "2+2, 2+3"}]
        turn = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        one, two = (call.model_dump() for call in turn.choices[0].message.tool_calls or ())
        four, five = ({"role": "tool", "tool_call_id": c["id"], "content": t} for c, t in ((one, "4"), (two, "5")))
        first, second, both = (
            {"role": "assistant", "content": "", "tool_calls": each} for each in ([one], [two], [one, two])
        )
        messages += [first, four, second, five] if is_split else [both, five, four]
        await client.chat.completions.create(model="m", messages=messages, tools=[ADD])

    async with agents_scene(_writes(calls, "4 and 5<|im_end|>")) as scene:
        text = _told(scene, await _played(scene, play))
    assert "<tool_response>\n4\n</tool_response><tool_response>\n5\n</tool_response>" in text


def test_calls_of_an_example_in_the_prompt_stay_messages_of_their_own() -> None:
    ids = ("call00001", "call00002")
    calls = [{"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in ids]
    said = read_messages([{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls])
    assert [message.wording[1] for message in said] == [[name] for name in ids]


async def test_begun_answer_is_continued_at_the_start_and_refused_behind_a_turn() -> None:
    async with taken() as (scene, _, client):
        asked: Any = {"role": "user", "content": "2+2"}
        begun: Any = {"role": "assistant", "content": "It is"}
        first = await client.chat.completions.create(model="m", messages=[asked, begun])
        assert scene.engine.decode(scene.engine.wrote[0][0]).endswith("assistant\nIt is")
        turn: Any = first.choices[0].message
        other: Any = {"role": "system", "content": "You check others."}
        for messages in ([asked, begun, turn, asked, begun], [other, asked, turn]):
            with pytest.raises(BadRequestError, match=r"the policy cannot continue it\. End with a user's or a to"):
                await client.chat.completions.create(model="m", messages=messages)


async def test_results_have_the_names_of_their_tools() -> None:
    """Templates such as Functionary's write them, and OpenAI's form has none."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    turn, result = read_messages(
        [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "4"}]
    )
    request = TurnRequest([turn, result], [], {}, may_call=True, stops=(), max_tokens=None)
    assert request.as_rendered(1, {}) == [{"role": "tool", "name": "add", "tool_call_id": "c1", "content": "4"}]
