"""Samples that cannot be made: each failure is named by who failed, and none becomes a trajectory."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import NeighbourError
from rollout.environments.base import Observation, Resources, Step, Task, Turn
from rollout.environments.search import Search
from rollout.episodes.conversation import SampleTask, WrittenSoFar
from rollout.neighbours.reward_client import Score, ScoreRequest
from tests.fakes.engines import ScriptedEngine, Written
from tests.fakes.rollout_fakes import ScriptedScorer
from tests.rollout.episodes.played import SAMPLE, make_player


async def _failing_search(query: str) -> list[str]:
    raise NeighbourError("retriever", "down")


NO_CONTENT = SampleTask("g", 0, 1, 1, "train", 7, Task([{"role": "user"}], "A", {}))


@pytest.mark.parametrize(
    ("options", "sample", "problem"),
    [
        ({}, NO_CONTENT, "prompt: the model's chat template refuses it: a message has no content"),
        ({"max_context_tokens": 3}, SAMPLE, "prompt: has 3 tokens; rollout.max_context_tokens = 3"),
        ({"scorer": ScriptedScorer(NeighbourError("reward:em", "down"))}, SAMPLE, "reward:em: down"),
        (
            {"environment": Search, "resources": Resources(3, {"search": _failing_search})},
            SAMPLE,
            "retriever: down",
        ),
    ],
)
async def test_failure_has_the_name_of_its_boundary(options: Any, sample: SampleTask, problem: str) -> None:
    engine = ScriptedEngine(lambda context: "<search>x</search>")
    with pytest.raises(NeighbourError) as failed:
        await make_player(engine, **options).play(sample)
    assert str(failed.value) == problem
    assert len(engine.requests) <= 1


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
    trajectory = await make_player(ScriptedEngine(lambda context: "a"), Talking, ScriptedScorer(0.5)).play(SAMPLE)

    assert trajectory.facts.reward == 1.25
    assert trajectory.facts.reward_parts == {"fake": 0.5, "environment": 0.75}
    assert trajectory.facts.num_turns == 3
    assert "".join(map(chr, trajectory.tokens[1:])) == "Q?ago onago ona"


class Unscored(ScriptedScorer):
    """A run without endpoints."""

    async def score(self, request: ScoreRequest) -> Score:
        return Score(0.0, {})


class Silent(Talking):
    async def step(self, turn: Turn) -> Step:
        return Step("go on", is_done=turn.text == "a")


async def test_conversation_that_ends_without_any_reward_has_failed_and_one_that_is_cut_has_0() -> None:
    with pytest.raises(NeighbourError, match=r"^environment: gave no reward, and rewards\.endpoints is empty\. Give "):
        await make_player(ScriptedEngine(lambda context: "a"), Silent, Unscored()).play(SAMPLE)
    cut = await make_player(ScriptedEngine(lambda context: "bb"), Silent, Unscored()).play(SAMPLE)
    assert (cut.facts.finish, cut.facts.reward) == ("context", 0.0)


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
    ("environment", "turn_timeout_s", "problem"),
    [
        (NotANumber, 60.0, "environment: gave the reward nan"),
        (Broken, 60.0, rf"environment: KeyError: 'board' \({__file__}:\d+\)"),
        (Hanging, 0.05, "environment: no observation within rollout\\.turn_timeout_s = 0\\.05 s"),
    ],
)
async def test_environments_failure_is_no_trajectory(
    environment: Callable[[Resources], Talking], turn_timeout_s: float, problem: str
) -> None:
    with pytest.raises(NeighbourError) as caught:
        await make_player(ScriptedEngine(lambda context: "a"), environment, turn_timeout_s=turn_timeout_s).play(SAMPLE)
    assert re.fullmatch(problem, str(caught.value))


async def test_generation_has_a_deadline() -> None:
    engine = ScriptedEngine(lambda context: "a")
    engine.is_slow = True
    with pytest.raises(NeighbourError, match=r"^engine: request g/2/1/0-0 gave no generation within .* = 0.05 s$"):
        await make_player(engine, turn_timeout_s=0.05).play(SAMPLE)


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
        await make_player(ScriptedEngine(lambda context: written)).play(SAMPLE)
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
        await make_player(ScriptedEngine(write), Search, resources=Resources(3, {"search": search})).play(
            SAMPLE, written
        )
    assert written.num_model_tokens == 18 + 19


async def test_tokens_of_a_generation_that_cannot_be_used_are_written_too() -> None:
    engine, written = ScriptedEngine(lambda context: Written("abc", finish_reason="abort")), WrittenSoFar()
    with pytest.raises(NeighbourError, match="the reason abort"):
        await make_player(engine).play(SAMPLE, written)
    assert written.num_model_tokens == 3


async def test_times_are_measured_where_they_pass() -> None:
    class Slow(Talking):
        async def step(self, turn: Turn) -> Step:
            await asyncio.sleep(0.02)
            return Step(is_done=True)

    facts = (await make_player(ScriptedEngine(lambda context: "a"), Slow).play(SAMPLE)).facts

    assert facts.environment_s >= 0.02
    assert facts.generate_s + facts.environment_s + facts.reward_s <= facts.finished_at - facts.started_at + 0.001
