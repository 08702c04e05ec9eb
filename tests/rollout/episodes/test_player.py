"""One sample from prompt to trajectory, with an engine that writes by script."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocol.wire.conversation import FinishedTurn
from protocol.wire.trajectory import TimedCall, TurnReward, VersionSpan
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import SingleTurn, Step, Task, Turn
from rollout.environments.search import Search
from rollout.episodes.conversation import SampleTask, WrittenSoFar
from rollout.episodes.transcript import Transcript
from rollout.session.turns_to_keep import InterruptedSample
from tests.fakes.engines import BOS, ScriptedEngine, Written
from tests.fakes.rollout_fakes import ScriptedScorer
from tests.rollout.engine.three_turns import Copies
from tests.rollout.episodes.played import SAMPLE, TASK, finding, make_player


async def test_search_trajectory_has_exact_mask_spans_and_logprobs() -> None:
    """Prompt 3 tokens, a search of 19 (the push fell after its 4th), an observation of 32, an answer of 18."""

    def write(context: str) -> Written:
        if "<information>" in context:
            return Written("<answer>B</answer>", first_logprob=-0.5)
        return Written("<search>AB</search>.", versions=((4, 6), (15, 7)))

    engine = ScriptedEngine(write, version=7)
    scorer = ScriptedScorer(0.75)
    player = make_player(engine, Search, scorer, finding('"T"\nx'))

    trajectory = await player.play(SAMPLE)

    text = "Q?<search>AB</search><information> T: x</information><answer>B</answer>"
    assert trajectory.tokens.tolist() == [BOS, *map(ord, text)]
    assert trajectory.loss_mask.tolist() == [0] * 3 + [1] * 19 + [0] * 32 + [1] * 18
    assert trajectory.facts.version_spans == [VersionSpan(3, 7, 6), VersionSpan(7, 22, 7), VersionSpan(54, 72, 7)]
    expected = [0.0] * 3 + [-(i + 1) / 8 for i in range(19)] + [0.0] * 32 + [-(i + 1) / 2 for i in range(18)]
    assert trajectory.behaviour_logprobs.tolist() == expected
    assert trajectory.behaviour_logprobs.dtype == np.float32
    facts = trajectory.facts
    assert (facts.group, facts.sample_index, facts.attempt, facts.kind, facts.server) == ("g", 2, 1, "train", "s0")
    assert (facts.num_tokens, facts.num_prompt_tokens, facts.num_turns, facts.finish) == (72, 3, 2, "answer")
    assert (facts.reward, facts.reward_parts, facts.is_greedy) == (0.75, {"fake": 0.75}, False)
    (asked,) = scorer.requests
    assert (asked.key, asked.prompt, asked.response) == ("g/2/1", "<bos>Q?", text[2:])
    assert (asked.label, asked.num_turns) == ("A", 2)


async def test_turn_ends_at_the_stop_strings_that_its_environment_has_then() -> None:
    class Changing(SingleTurn):
        async def reset(self, task: Task) -> str:
            self.stop = ("</a>",)
            return "Q?"

        async def step(self, turn: Turn) -> Step:
            is_done = self.stop == ("</b>",)
            self.stop = ("</b>",)
            return Step("|", is_done=is_done)

    engine = ScriptedEngine(lambda context: "x</a>y</b>z")
    trajectory = await make_player(engine, Changing).play(SAMPLE)
    assert engine.decode(trajectory.tokens.tolist()) == "<bos>Q?x</a>|x</a>y</b>"


async def test_each_turn_sees_all_tokens_before_it_under_the_version_held() -> None:
    def write(context: str) -> str:
        engine.policy_version = 8
        return "<answer>B</answer>" if "<information>" in context else "<search>AB</search>"

    engine = ScriptedEngine(write, version=7)
    await make_player(engine, Search, resources=finding()).play(SAMPLE)

    (first, second) = engine.requests
    assert first[0] == "<bos>Q?"
    assert second[0] == "<bos>Q?<search>AB</search><information> Nothing was found.</information>"
    assert (first[3], second[3]) == (7, 8)
    assert first[1].stop == ("</search>", "</answer>")
    assert (first[1].max_tokens, first[1].temperature, first[1].greedy) == (32, 1.0, False)
    assert first[2] != second[2]


async def test_sampling_seed_depends_on_run_sample_attempt_and_turn_only() -> None:
    engine = ScriptedEngine(lambda context: "a")
    player = make_player(engine)
    for seed, index, attempt in [(7, 2, 1), (7, 2, 1), (8, 2, 1), (7, 3, 1), (7, 2, 2)]:
        await player.play(SampleTask("g", index, attempt, 1, "train", seed, TASK))

    seeds = [request[1].seed for request in engine.requests]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4


async def test_greedy_sample_is_drawn_without_a_seed_and_marked() -> None:
    engine = ScriptedEngine(lambda context: "a")
    task = Task("Q?", "A", {}, is_greedy=True)
    trajectory = await make_player(engine).play(SampleTask("g", 0, 1, 1, "eval", 7, task))

    assert engine.requests[0][1].greedy
    assert engine.requests[0][1].seed is None
    assert trajectory.facts.is_greedy
    assert trajectory.facts.kind == "eval"


async def test_chat_messages_go_through_the_template_with_a_generation_prompt() -> None:
    engine = ScriptedEngine(lambda context: "a")
    task = Task([{"role": "user", "content": "Q?"}], "A", {})
    await make_player(engine).play(SampleTask("g", 0, 1, 1, "train", 7, task))

    assert engine.requests[0][0] == "[user]Q?[assistant]"


@pytest.mark.parametrize(
    ("written", "settings", "finish", "num_tokens"),
    [
        ("a", {}, "stop", 4),
        ("a" * 50, {}, "length", 3 + 32),
        ("a" * 50, {"max_context_tokens": 20}, "context", 20),
    ],
)
async def test_single_turn_finish(written: str, settings: dict[str, Any], finish: str, num_tokens: int) -> None:
    trajectory = await make_player(ScriptedEngine(lambda context: written), **settings).play(SAMPLE)

    assert (trajectory.facts.finish, trajectory.facts.num_tokens) == (finish, num_tokens)


@pytest.mark.parametrize(("said", "finish"), [("answer", "answer"), ("turns", "context"), (None, "context")])
async def test_answer_is_one_though_it_fills_the_context(said: Any, finish: str) -> None:
    class Ending(SingleTurn):
        async def step(self, turn: Turn) -> Step:
            return Step(is_done=True, finish=said)

    player = make_player(ScriptedEngine(lambda context: "a" * 50), Ending, max_context_tokens=20)
    assert (await player.play(SAMPLE)).facts.finish == finish


@pytest.mark.parametrize(
    ("limit_s", "written", "finish", "num_turns"),
    [
        (None, "<search>AB</search>", "turns", 4),
        (1e6, "<search>AB</search>", "turns", 4),
        (1e-9, "<search>AB</search>", "time", 1),
        (1e-9, "<answer>AB</answer>", "answer", 1),
    ],
)
async def test_conversation_that_is_out_of_time_gets_no_further_turn(
    limit_s: float | None, written: str, finish: str, num_turns: int
) -> None:
    engine = ScriptedEngine(lambda context: written)
    limits = {"max_conversation_s": limit_s, "max_context_tokens": 1000}
    trajectory = await make_player(engine, Search, resources=finding("x"), **limits).play(SAMPLE)
    facts = trajectory.facts
    assert (facts.finish, facts.num_turns) == (finish, num_turns)
    assert trajectory.loss_mask[-1] == 1  # nothing stands behind the last turn that no turn would read


@pytest.mark.parametrize(("took_s", "finish"), [(10.0, "answer"), (200.0, "time")])
async def test_time_of_a_conversation_that_another_server_began_is_not_by_its_clock(took_s: float, finish: str) -> None:
    engine = ScriptedEngine(lambda context: "<answer>B</answer>" if "<search>" in context else "<search>B</search>")
    begun = Transcript(
        tokens=[BOS, *map(ord, "Q?A ")],
        num_prompt_tokens=3,
        logprobs=[0.0, 0.0, 0.0, -0.5, 0.0],
        loss_mask=[0, 0, 0, 1, 0],
        version_spans=[VersionSpan(3, 4, 0)],
        turns=[FinishedTurn(3, 4, "stop", None, [TimedCall("turn", "stop", 1.0, 2.0, 0, 3, 1)])],
        started_at=1.0,
        generate_s=took_s,
    )
    player = make_player(engine, Search, resources=finding("x"), max_conversation_s=100.0, max_context_tokens=1000)
    trajectory = await player.play(SAMPLE, WrittenSoFar(listener=Copies(InterruptedSample(begun, '{"turns": 1}'))))
    assert trajectory.facts.finish == finish
    assert [call.num_input for call in trajectory.facts.calls if call.kind == "turn"][:2] == [3, 5]


async def test_what_an_environment_gives_turn_by_turn_is_kept_with_the_ends_of_the_turns() -> None:
    class Giving(SingleTurn):
        turn = 0

        async def step(self, turn: Turn) -> Step:
            self.turn += 1
            reward = [0.25, 0.0, None, 0.5, 1.0][self.turn - 1]
            return Step("..", is_done=self.turn == 5, reward=reward)

    trajectory = await make_player(ScriptedEngine(lambda context: "ab"), Giving).play(SAMPLE)
    facts = trajectory.facts
    assert (facts.reward_parts["environment"], facts.num_turns) == (1.75, 5)
    # Three tokens of the prompt, then two of each turn and two of each reply; the last turn's is the rest.
    assert facts.turn_rewards == [TurnReward(5, 0.25), TurnReward(17, 0.5)]


async def test_conversation_ends_when_the_next_turn_has_no_room() -> None:
    """3 + 19 tokens and an observation of 32 fill 54: with a window of 54 nothing could follow it."""
    engine = ScriptedEngine(lambda context: "<search>AB</search>")
    for window, num_tokens in [(54, 22), (55, 55)]:
        trajectory = await make_player(engine, Search, resources=finding('"T"\nx'), max_context_tokens=window).play(
            SAMPLE
        )
        assert (trajectory.facts.finish, trajectory.facts.num_tokens) == ("context", num_tokens)


async def test_observation_over_the_limit_loses_the_end_of_its_body() -> None:
    engine = ScriptedEngine(lambda context: "<answer>B</answer>" if "<info" in context else "<search>AB</search>")
    player = make_player(engine, Search, resources=finding("0123456789"), max_observation_tokens=30)
    trajectory = await player.play(SAMPLE)

    assert "<information> 01</information><answer>" in "".join(map(chr, trajectory.tokens))
    assert trajectory.facts.reward_logs == {"environment/cut_replies": 1.0}


async def test_turn_waits_while_weights_change() -> None:
    engine = ScriptedEngine(lambda context: "a", version=None)
    gate = VersionGate()
    playing = asyncio.create_task(make_player(engine, gate=gate).play(SAMPLE))
    await asyncio.sleep(0.02)
    assert engine.requests == []

    engine.policy_version = 3
    gate.open()

    assert (await playing).facts.version_spans == [VersionSpan(3, 4, 3)]
    assert engine.requests[0][3] == 3


@pytest.mark.parametrize(("truncate_left", "length"), [(True, 24), (False, 30)])
async def test_prompt_without_room_for_an_answer_loses_its_beginning_by_a_setting(
    truncate_left: bool, length: int
) -> None:
    limits = {"max_response_tokens": 8, "max_context_tokens": 32, "truncate_left": truncate_left}
    player = make_player(ScriptedEngine(lambda context: "4"), **limits)
    prompt = "abcdefghijklmnopqrstuvwxyz0123"
    made = await player.play(SampleTask("g", 0, 1, 1, "train", 7, Task(prompt, None, {})))
    assert "".join(map(chr, made.tokens[: made.facts.num_prompt_tokens])).endswith(prompt[-length:])
    assert made.facts.num_prompt_tokens <= length + 1


class Emptying(SingleTurn):
    """Uses up its row."""

    async def reset(self, task: Task) -> str:
        task.label.clear()
        dict.clear(task.columns)  # type: ignore[arg-type]
        return "Q?"


async def test_reward_services_get_the_row_whatever_an_environment_does_to_it() -> None:
    scorer, task = ScriptedScorer(), Task("Q?", ["A", "B"], {"hints": ["x"]})
    player = make_player(ScriptedEngine(lambda context: "A"), Emptying, scorer)
    await player.play(replace(SAMPLE, task=task))
    (request,) = scorer.requests
    assert (request.label, request.columns) == (["A", "B"], {"hints": ["x"]})
