"""What becomes of a step's rewards, against slow loops, in float64."""

from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.algorithms.shaping import RunningMoments, ShapedRewards, overlong_penalty, shape_rewards
from protocol.settings.rewards import RewardsSettings

REWARDS = [0.0, 1.0, 20.0, -30.0]
LENGTHS = [10.0, 90.0, 100.0, 85.0]
IS_TRUNCATED = [False, False, True, False]


def of(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shaped(moments: RunningMoments | None = None, **settings: Any) -> ShapedRewards:
    is_truncated = torch.tensor(IS_TRUNCATED)
    before = moments or RunningMoments()
    return shape_rewards(of(REWARDS), of(LENGTHS), is_truncated, before, RewardsSettings(**settings), 100)


@pytest.mark.parametrize(("most", "buffer", "factor"), [(100, 20, 1.0), (90, 90, 0.5), (2, 1, 3.0)])
def test_overlong_penalty_is_the_formula(most: int, buffer: int, factor: float) -> None:
    lengths = [0.0, 1.0, 2.0, 79.0, 80.0, 81.0, 89.0, 90.0, 99.0, 100.0, 5000.0]
    over = [max(0.0, length - (most - buffer)) for length in lengths]
    expected = [-min(each, buffer) / buffer * factor for each in over]
    found = overlong_penalty(of(lengths), most, buffer, factor).tolist()
    assert found == pytest.approx(expected, rel=0, abs=1e-12)


def test_moments_over_several_steps_are_those_of_all_their_rewards() -> None:
    steps = [[1e6 + 1.0], [1e6 + 2.0, 1e6 - 7.0, 1e6], [], [1e6 + 0.5] * 5]
    moments, seen = RunningMoments(), []
    for step in steps:
        moments, seen = moments.after(of(step)), seen + step
    assert moments.count == 9.0
    assert moments.mean == pytest.approx(fmean(seen), rel=1e-12)
    found = moments.normalise(of(seen)).tolist()
    assert found == pytest.approx([(value - fmean(seen)) / stdev(seen) for value in seen], abs=1e-6)


@pytest.mark.parametrize("rewards", [[], [0.3], [0.1] * 4])
def test_normalised_rewards_without_spread_are_zeros(rewards: list[float]) -> None:
    assert RunningMoments().after(of(rewards)).normalise(of(rewards)).tolist() == pytest.approx([0.0] * len(rewards))


def test_deviation_of_zero_divides_as_1e_8() -> None:
    assert RunningMoments(count=1.0).normalise(of([1e-8, -2e-8])).tolist() == pytest.approx([1.0, -2.0])


def test_rewards_stay_as_they_are_unless_asked_for() -> None:
    found = shaped()
    assert found.rewards.tolist() == REWARDS
    assert found.is_trained.tolist() == [True] * 4
    assert found.moments == RunningMoments()


def test_rewards_are_cut_before_penalties_are_taken_off() -> None:
    found = shaped(clip=10.0, overlong_buffer_tokens=20, truncated="penalise", truncated_penalty=2.0)
    assert found.rewards.tolist() == [0.0, 0.5, 10.0 - 1.0 - 2.0, -10.0 - 0.25]
    assert found.is_trained.tolist() == [True] * 4


def test_overlong_budget_may_be_another_than_one_turns() -> None:
    assert shaped(overlong_buffer_tokens=5, overlong_max_tokens=15).rewards.tolist() == [0.0, 0.0, 19.0, -31.0]


def test_masked_trajectories_keep_their_reward_and_are_not_trained() -> None:
    found = shaped(truncated="mask")
    assert found.rewards.tolist() == REWARDS
    assert found.is_trained.tolist() == [True, True, False, True]


def test_normalised_rewards_are_cut_by_their_deviation_and_the_moments_go_on() -> None:
    before = RunningMoments().after(of([5.0, 7.0]))
    found = shaped(before, normalize=True, clip=1.0)
    everything = [5.0, 7.0, *REWARDS]
    expected = [max(-1.0, min(1.0, (r - fmean(everything)) / stdev(everything))) for r in REWARDS]
    assert found.rewards.tolist() == pytest.approx(expected, abs=1e-9)
    assert found.moments == before.after(of(REWARDS))
