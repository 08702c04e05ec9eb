"""Rewards of single turns stand at their turns' ends, whatever the micro-batches: against a loop over single tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from learner.algorithms.advantages.gae import gae_advantages
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.objectives.advantages import of_tokens, token_rewards
from learner.objectives.policy_gradient import PolicyGradient
from protocol.errors import SettingsError
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory, TurnReward
from tests.learner.objectives.slow_policy_gradient import trajectories

GAMMA, LAM = 0.9, 0.8


def credited() -> list[Trajectory]:
    """Return trajectories of two turns; the environment gave every second one something for its first."""
    made = []
    for number, trajectory in enumerate(trajectories()):
        turns = [TurnReward(trajectory.facts.version_spans[0].end, 0.5 - number)] if number % 2 == 0 else []
        made.append(replace(trajectory, facts=msgspec.structs.replace(trajectory.facts, turn_rewards=turns)))
    return made


def slow_rewards(trajectory: Trajectory) -> list[float]:
    """Return each model token's reward."""
    at = {turn.end - 1: turn.reward for turn in trajectory.facts.turn_rewards}
    last = max(place for place in range(len(trajectory.tokens)) if trajectory.loss_mask[place])
    at[last] = trajectory.facts.reward - sum(at.values())
    return [at.get(place, 0.0) for place in range(len(trajectory.tokens)) if trajectory.loss_mask[place]]


def slow_gae(rewards: list[float], values: list[float]) -> list[float]:
    found, following_advantage, following_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following_advantage = reward + GAMMA * following_value - value + GAMMA * LAM * following_advantage
        following_value = value
        found.append(following_advantage)
    return found[::-1]


def value_of(trajectory: Trajectory, place: int) -> float:
    return float(trajectory.behaviour_logprobs[place]) / 3.0


def packed(made: list[Trajectory], numbers: list[int]) -> MicroBatch:
    samples = [
        LearnerSample(made[n].tokens, made[n].loss_mask.astype(np.bool_), made[n].behaviour_logprobs, number=n)
        for n in numbers
    ]
    micro_batch = make_micro_batch(samples)
    return replace(micro_batch, values=micro_batch.behaviour_logprobs / 3.0)


@pytest.mark.parametrize("parts", [[[n] for n in range(9)], [[4, 0, 8], [1, 2, 3, 5, 6, 7]], [[*range(9)], []]])
def test_rewards_and_advantages_of_tokens_are_those_of_a_loop_over_them(parts: list[list[int]]) -> None:
    made = credited()
    scores = torch.tensor([each.facts.reward for each in made], dtype=torch.float64)
    of_turns = [each.facts.turn_rewards for each in made]
    micro_batches = [packed(made, part) for part in parts]
    rewards = [token_rewards(each, scores, of_turns) for each in micro_batches]
    advantages = of_tokens(micro_batches, rewards, gae_advantages, GAMMA, LAM)
    for micro_batch, of_each, advantage in zip(micro_batches, rewards, advantages, strict=True):
        expected = {n: slow_rewards(made[n]) for n in micro_batch.numbers if n >= 0}
        assert of_each.tolist() == pytest.approx([reward for one in expected.values() for reward in one], abs=1e-12)
        slow = []
        for number, own in expected.items():
            trajectory = made[number]
            values = [value_of(trajectory, p) for p in range(len(trajectory.tokens)) if trajectory.loss_mask[p]]
            slow += slow_gae(own, values)
        assert advantage.tolist() == pytest.approx(slow, abs=1e-6)


def test_rewards_of_turns_stand_where_they_do_without_a_shared_prompt() -> None:
    mask = np.isin(np.arange(80), [70, 71, 75, 76, 77])
    samples = [LearnerSample(np.arange(80, dtype=np.int32), mask, np.zeros(80, np.float32), number=n) for n in (0, 1)]
    turns = [[TurnReward(72, 0.25)], [TurnReward(72, -2.0)]]
    scores = torch.tensor([1.0, 3.0], dtype=torch.float64)
    micro_batch = make_micro_batch(samples, share_prompts=True)
    assert micro_batch.lengths == (80, 10)
    assert token_rewards(micro_batch, scores, turns).tolist() == [0, 0.25, 0, 0, 0.75, 0, -2.0, 0, 0, 5.0]


def test_rewards_of_turns_are_left_at_the_end_where_none_are_named() -> None:
    made = credited()
    micro_batch = packed(made, [0, 1])
    scores = torch.tensor([each.facts.reward for each in made], dtype=torch.float64)
    rewards = torch.split(token_rewards(micro_batch, scores), list(micro_batch.counts))
    for number, of_one in zip(micro_batch.numbers, rewards, strict=True):
        assert of_one.tolist() == [0.0] * (len(of_one) - 1) + [made[number].facts.reward]


def test_a_users_advantage_of_groups_is_refused_instead_of_losing_the_turns(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(rewards, lengths):\n    return rewards\n")
    settings = Settings.model_validate(
        {"learner": {"advantage": f"{tmp_path}/mine.py:mine"}, "rewards": {"credit": "turn"}}
    )
    roles = cast(Any, None)
    with pytest.raises(SettingsError, match=r"mine\.py:mine gives them one advantage\. Make it an advantage of tokens"):
        PolicyGradient(roles, settings, lambda sums: sums)
