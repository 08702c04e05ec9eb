"""OPO's and REINFORCE++-baseline's advantages of groups against slow loops, in float64."""

import pytest
import torch

from learner.algorithms.advantages.opo import opo_advantages
from tests.learner.algorithms.slow_groups import REWARDS, advantages_of, check_every_advantage

LENGTHS = [[10.0, 2.0, 7.0, 1.0], [3.0, 4.0, 5.0, 6.0], [1.0, 900.0, 30.0, 2.0]]


def slow(rewards: list[float], lengths: list[float]) -> list[float]:
    baseline = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def test_opo_equals_the_slow_loop() -> None:
    found = opo_advantages(torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(LENGTHS, dtype=torch.float64))
    for group, rewards, lengths in zip(found.tolist(), REWARDS, LENGTHS, strict=True):
        assert group == pytest.approx(slow(rewards, lengths), rel=0, abs=1e-12)


def test_reinforce_pp_baseline_is_the_distance_from_the_group_before_it_is_whitened() -> None:
    for group, rewards in zip(advantages_of("reinforce_pp_baseline"), REWARDS, strict=True):
        assert group == pytest.approx([r - sum(rewards) / 4 for r in rewards], rel=0, abs=1e-12)


@pytest.mark.parametrize("name", ["opo", "reinforce_pp_baseline"])
def test_equal_rewards_give_exactly_zero_and_a_group_of_one_is_refused(name: str) -> None:
    check_every_advantage(name)
