"""One sample from prompt to trajectory, with an engine that writes by script."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocol.errors import NeighbourError
from protocol.settings.rollout import RolloutSettings
from protocol.wire.trajectory import VersionSpan
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import MakeEnvironment, Observation, Resources, Step, Task, Turn
from rollout.environments.search import Search
from rollout.environments.single_turn import SingleTurn
from rollout.episodes.player import EpisodePlayer
from rollout.episodes.sample import SampleTask, WrittenSoFar
from tests.fakes.rollout_fakes import BOS, ScriptedEngine, ScriptedScorer, Written

TASK = Task("Q?", "A", {})
SAMPLE = SampleTask("g", 2, 1, 1, "train", 7, TASK)


def _player(
    engine: ScriptedEngine,
    environment: MakeEnvironment = SingleTurn,
    scorer: ScriptedScorer | None = None,
    resources: Resources | None = None,
    gate: VersionGate | None = None,
    **settings: Any,
) -> EpisodePlayer:
    if gate is None:
        gate = VersionGate()
        gate.open()
    limits = {"max_response_tokens": 32, "max_context_tokens": 256, "max_observation_tokens": 96, **settings}
    return EpisodePlayer(
        engine,
        gate,
        environment,
        resources or Resources(3),
        scorer or ScriptedScorer(),
        RolloutSettings(**limits),
        "s0",
    )


def _finding(*contents: str) -> Resources:
    async def search(query: str) -> list[str]:
        return list(contents)

    return Resources(3, {"search": search})


async def test_search_trajectory_has_exact_mask_spans_and_logprobs() -> None:
    """Prompt 3 tokens, a search of 19 (the push fell after its 4th), an observation of 32, an answer of 18."""

    def write(context: str) -> Written:
        if "<information>" in context:
            return Written("<answer>B</answer>", first_logprob=-0.5)
        return Written("<search>AB</search>.", versions=((4, 6), (15, 7)))

    engine = ScriptedEngine(write, version=7)
    scorer = ScriptedScorer(0.75)
    player = _player(engine, Search, scorer, _finding('"T"\nx'))

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
    assert (asked.key, asked.prompt, asked.response, asked.label) == ("g/2/1", "<bos>Q?", text[2:], "A")


async def test_each_turn_sees_all_tokens_before_it_under_the_version_held() -> None:
    def write(context: str) -> str:
        engine.policy_version = 8
        return "<answer>B</answer>" if "<information>" in context else "<search>AB</search>"

    engine = ScriptedEngine(write, version=7)
    await _player(engine, Search, resources=_finding()).play(SAMPLE)

    (first, second) = engine.requests
    assert first[0] == "<bos>Q?"
    assert second[0] == "<bos>Q?<search>AB</search><information> Nothing was found.</information>"
    assert (first[3], second[3]) == (7, 8)
    assert first[1].stop == ("</search>", "</answer>")
    assert (first[1].max_tokens, first[1].temperature, first[1].greedy) == (32, 1.0, False)
    assert first[2] != second[2]


async def test_sampling_seed_depends_on_run_sample_attempt_and_turn_only() -> None:
    engine = ScriptedEngine(lambda context: "a")
    player = _player(engine)
    for seed, index, attempt in [(7, 2, 1), (7, 2, 1), (8, 2, 1), (7, 3, 1), (7, 2, 2)]:
        await player.play(SampleTask("g", index, attempt, 1, "train", seed, TASK))

    seeds = [request[1].seed for request in engine.requests]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4


async def test_greedy_sample_is_drawn_without_a_seed_and_marked() -> None:
    engine = ScriptedEngine(lambda context: "a")
    task = Task("Q?", "A", {}, is_greedy=True)
    trajectory = await _player(engine).play(SampleTask("g", 0, 1, 1, "eval", 7, task))

    assert engine.requests[0][1].greedy
    assert engine.requests[0][1].seed is None
    assert trajectory.facts.is_greedy
    assert trajectory.facts.kind == "eval"


async def test_chat_messages_go_through_the_template_with_a_generation_prompt() -> None:
    engine = ScriptedEngine(lambda context: "a")
    task = Task([{"role": "user", "content": "Q?"}], "A", {})
    await _player(engine).play(SampleTask("g", 0, 1, 1, "train", 7, task))

    assert engine.requests[0][0] == "[user]Q?[assistant]"


async def test_chat_messages_the_template_refuses_are_a_failure_of_the_prompt() -> None:
    task = Task([{"role": "user"}], "A", {})
    with pytest.raises(
        NeighbourError, match=r"^prompt: the model's chat template refuses it: a message has no content$"
    ):
        await _player(ScriptedEngine(lambda context: "a")).play(SampleTask("g", 0, 1, 1, "train", 7, task))


async def test_prompt_without_room_is_a_failure_of_the_prompt() -> None:
    with pytest.raises(NeighbourError, match=r"^prompt: has 3 tokens; rollout.max_context_tokens = 3$"):
        await _player(ScriptedEngine(lambda context: "a"), max_context_tokens=3).play(SAMPLE)


@pytest.mark.parametrize(
    ("written", "settings", "finish", "num_tokens"),
    [
        ("a", {}, "stop", 4),
        ("a" * 50, {}, "length", 3 + 32),
        ("a" * 50, {"max_context_tokens": 20}, "context", 20),
    ],
)
async def test_single_turn_finish(written: str, settings: dict[str, Any], finish: str, num_tokens: int) -> None:
    trajectory = await _player(ScriptedEngine(lambda context: written), **settings).play(SAMPLE)

    assert (trajectory.facts.finish, trajectory.facts.num_tokens) == (finish, num_tokens)


@pytest.mark.parametrize(("said", "finish"), [("answer", "answer"), ("turns", "context"), (None, "context")])
async def test_answer_is_one_though_it_fills_the_context(said: Any, finish: str) -> None:
    class Ending(SingleTurn):
        async def step(self, turn: Turn) -> Step:
            return Step(is_done=True, finish=said)

    player = _player(ScriptedEngine(lambda context: "a" * 50), Ending, max_context_tokens=20)
    assert (await player.play(SAMPLE)).facts.finish == finish


async def test_conversation_ends_when_the_next_turn_has_no_room() -> None:
    """3 + 19 tokens and an observation of 32 fill 54: with a window of 54 nothing could follow it."""
    engine = ScriptedEngine(lambda context: "<search>AB</search>")
    for window, num_tokens in [(54, 22), (55, 55)]:
        trajectory = await _player(engine, Search, resources=_finding('"T"\nx'), max_context_tokens=window).play(SAMPLE)
        assert (trajectory.facts.finish, trajectory.facts.num_tokens) == ("context", num_tokens)


async def test_observation_over_the_limit_loses_the_end_of_its_body() -> None:
    engine = ScriptedEngine(lambda context: "<answer>B</answer>" if "<info" in context else "<search>AB</search>")
    player = _player(engine, Search, resources=_finding("0123456789"), max_observation_tokens=30)
    trajectory = await player.play(SAMPLE)

    assert "<information> 01</information><answer>" in "".join(map(chr, trajectory.tokens))
    assert player.num_cut_observations == 1


class Talking:
    """Says "go on" twice and gives a reward each time; what it does is changed by the tests."""

    stop: tuple[str, ...] = ()
    reward: float = 0.25

    def __init__(self, resources: Resources) -> None:
        self._num_turns = 0

    async def reset(self, task: Task) -> str:
        return "Q?"

    async def step(self, turn: Turn) -> Step:
        self._num_turns += 1
        if self._num_turns == 3:
            return Step(is_done=True, reward=self.reward)
        return Step("go on", reward=self.reward)


async def test_environments_rewards_are_summed_and_added_under_their_own_part() -> None:
    trajectory = await _player(ScriptedEngine(lambda context: "a"), Talking, ScriptedScorer(0.5)).play(SAMPLE)

    assert trajectory.facts.reward == 1.25
    assert trajectory.facts.reward_parts == {"fake": 0.5, "environment": 0.75}
    assert trajectory.facts.num_turns == 3
    assert "".join(map(chr, trajectory.tokens[1:])) == "Q?ago onago ona"


class NotANumber(Talking):
    reward = float("nan")


class Broken(Talking):
    async def step(self, turn: Turn) -> Step:
        raise KeyError("board")


class Hanging(Talking):
    async def step(self, turn: Turn) -> Step:
        await asyncio.sleep(60)
        return Step(Observation("never"))


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (NotANumber, "environment: gave the reward nan"),
        (Broken, rf"environment: KeyError: 'board' \({__file__}:\d+\)"),
        (Hanging, "environment: no observation within rollout\\.turn_timeout_s = 0\\.05 s"),
    ],
)
async def test_environments_failure_is_no_trajectory(environment: Callable[[Resources], Talking], problem: str) -> None:
    with pytest.raises(NeighbourError) as caught:
        await _player(ScriptedEngine(lambda context: "a"), environment, turn_timeout_s=0.05).play(SAMPLE)
    assert re.fullmatch(problem, str(caught.value))


async def test_failed_reward_is_no_trajectory() -> None:
    scorer = ScriptedScorer(NeighbourError("reward:em", "down"))
    with pytest.raises(NeighbourError, match=r"^reward:em: down$"):
        await _player(ScriptedEngine(lambda context: "a"), scorer=scorer).play(SAMPLE)


async def test_failed_search_is_no_observation() -> None:
    async def search(query: str) -> list[str]:
        raise NeighbourError("retriever", "down")

    engine = ScriptedEngine(lambda context: "<search>x</search>")
    with pytest.raises(NeighbourError, match=r"^retriever: down$"):
        await _player(engine, Search, resources=Resources(3, {"search": search})).play(SAMPLE)
    assert len(engine.requests) == 1


async def test_generation_has_a_deadline() -> None:
    engine = ScriptedEngine(lambda context: "a")
    engine.is_slow = True
    with pytest.raises(NeighbourError, match=r"^engine: request g/2/1/0-0 gave no generation within .* = 0.05 s$"):
        await _player(engine, turn_timeout_s=0.05).play(SAMPLE)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (Written("abc", finish_reason="abort"), "engine: request g/2/1/0-0 ended with 3 tokens and the reason abort"),
        (Written(""), "engine: request g/2/1/0-0 ended with 0 tokens and the reason stop"),
        (
            Written("ab", first_logprob=float("nan")),
            "trajectory: $.trajectory.behaviour_logprobs: holds a value that is not finite",
        ),
        (
            Written("abc", versions=((2, 1),)),
            "trajectory: $.trajectory.version_spans: do not cover exactly the tokens the model wrote",
        ),
    ],
)
async def test_engine_output_that_cannot_be_trained_is_a_failure(written: Written, problem: str) -> None:
    with pytest.raises(NeighbourError) as caught:
        await _player(ScriptedEngine(lambda context: written)).play(SAMPLE)
    assert str(caught.value) == problem


async def test_what_was_written_is_known_when_a_later_neighbour_fails() -> None:
    """Two turns of 18 and 19 tokens; what the retriever said between them was not written by the policy."""
    answers = iter([["found"], NeighbourError("retriever", "down")])

    async def search(query: str) -> list[str]:
        if isinstance(answer := next(answers), NeighbourError):
            raise answer
        return answer

    def write(context: str) -> str:
        return "<search>BC</search>" if "<information>" in context else "<search>A</search>"

    written = WrittenSoFar()
    with pytest.raises(NeighbourError, match=r"^retriever: down$"):
        await _player(ScriptedEngine(write), Search, resources=Resources(3, {"search": search})).play(SAMPLE, written)
    assert written.num_model_tokens == 18 + 19


async def test_tokens_of_a_generation_that_cannot_be_used_are_written_too() -> None:
    engine, written = ScriptedEngine(lambda context: Written("abc", finish_reason="abort")), WrittenSoFar()
    with pytest.raises(NeighbourError, match="the reason abort"):
        await _player(engine).play(SAMPLE, written)
    assert written.num_model_tokens == 3


async def test_turn_waits_while_weights_change() -> None:
    engine = ScriptedEngine(lambda context: "a", version=None)
    gate = VersionGate()
    playing = asyncio.create_task(_player(engine, gate=gate).play(SAMPLE))
    await asyncio.sleep(0.02)
    assert engine.requests == []

    engine.policy_version = 3
    gate.open()

    assert (await playing).facts.version_spans == [VersionSpan(3, 4, 3)]
    assert engine.requests[0][3] == 3


async def test_times_are_measured_where_they_pass() -> None:
    class Slow(Talking):
        async def step(self, turn: Turn) -> Step:
            await asyncio.sleep(0.02)
            return Step(is_done=True)

    facts = (await _player(ScriptedEngine(lambda context: "a"), Slow).play(SAMPLE)).facts

    assert 0.02 <= facts.environment_s <= facts.finished_at - facts.started_at
    assert facts.generate_s < 1.0
    assert facts.reward_s < 1.0
