"""A whole run whose samples a user's agent program plays, with OpenAI's client and a reward of its own."""

import re
from dataclasses import replace

import pytest

from tests.flow.contract_run import tokenizer
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, assert_same_weights, each_trained_once, run

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

_PROGRAM = """
from openai import AsyncOpenAI


async def play(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, timeout=120) as client:
        talk = [{"role": "user", "content": task.prompt}]
        first = await client.chat.completions.create(model="policy", messages=talk)
        talk += [first.choices[0].message, {"role": "user", "content": " again:"}]
        second = await client.chat.completions.create(model="policy", messages=talk, max_tokens=8)
    return sum((first.choices[0].message.content + second.choices[0].message.content).encode()) % 11 / 11
"""


def test_samples_of_a_users_agent_are_trained_once_on_the_tokens_that_were_sampled(
    cluster: FlowCluster, user: Bring, chatting: Bring
) -> None:
    program = user.folder / "my_agent.py"
    program.write_text(_PROGRAM)
    ran = run(
        cluster,
        replace(user, model=chatting.model),
        "agents",
        rollout__environment=f"agent:{program}:play",
        rewards__endpoints=[],
        rollout__max_context_tokens=1024,  # as in contract_run: one engine
        learner__max_staleness=0,
        report__samples_per_step=8,
    )
    assert ran.left.states == {"trained": 6}
    assert ran.left.trained == each_trained_once(3)
    assert ran.left.staleness == [0] * 24
    assert_same_weights(ran)
    assert {turns for (turns,) in ran.left.rows("SELECT num_turns FROM trajectories WHERE kind = 'train'")} == {2}
    assert len({reward for (reward,) in ran.left.rows("SELECT reward FROM trajectories")}) > 1
    for sample in ran.left.samples:
        bits = "".join(str(int(bit)) for bit in sample["loss_mask"])
        (between,) = re.finditer(r"(?<=1)0+(?=1)", bits)
        assert "user\n again:" in tokenizer().decode(sample["tokens"][slice(*between.span())])
    assert "agents generate at http://127.0.0.1:" in ran.command.stdout + ran.command.stderr
