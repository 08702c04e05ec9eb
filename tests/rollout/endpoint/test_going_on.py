"""Requests that go on with a conversation: its turns keep their tokens, and the policy reads what its agent says."""

from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI

from protocol.wire.trajectory import Trajectory
from rollout.endpoint.messages import read_messages
from tests.rollout.endpoint.agents_scene import AgentsScene, agents_scene


def _writes(*turns: str) -> Callable[[str], str]:
    written = iter(turns)
    return lambda context: next(written)


async def _played(scene: AgentsScene, play: Callable[[AsyncOpenAI], Any]) -> Trajectory:
    """Return the trajectory of one sample that this plays."""
    scene.coordinator.lease("g")
    told = await scene.take()
    async with scene.client(told) as client:
        await play(client)
    await scene.end(told, "reward", reward=1.0)
    return await scene.trajectory("g")


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
