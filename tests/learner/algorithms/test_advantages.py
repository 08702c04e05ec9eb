"""Advantages against slow loops written from the formulas, in float64."""

import math

import pytest
import torch

from learner.algorithms.by_name import ADVANTAGES

REWARDS = [[1.0, 0.0, 0.0, 0.5], [0.2, 0.2, 0.2, 0.2], [-3.0, 7.0, 0.0, 1.0]]


def slow_grpo(group: list[float]) -> list[float]:
    mean = sum(group) / len(group)
    std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
    return [(r - mean) / (std + 1e-6) for r in group]


def slow_dr_grpo(group: list[float]) -> list[float]:
    return [r - sum(group) / len(group) for r in group]


def slow_rloo(group: list[float]) -> list[float]:
    return [r - (sum(group) - r) / (len(group) - 1) for r in group]


@pytest.mark.parametrize(
    ("name", "slow"), [("grpo", slow_grpo), ("dr_grpo", slow_dr_grpo), ("rloo", slow_rloo)], ids=lambda v: str(v)
)
def test_advantages_equal_the_slow_loop(name: str, slow: object) -> None:
    found = ADVANTAGES[name](torch.tensor(REWARDS, dtype=torch.float64))
    assert callable(slow)
    torch.testing.assert_close(found, torch.tensor([slow(g) for g in REWARDS], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("reward", [0.0, 0.1, -1e6])
def test_advantages_are_exactly_zero_when_a_group_has_equal_rewards(name: str, reward: float) -> None:
    assert ADVANTAGES[name](torch.full((2, 7), reward)).tolist() == [[0.0] * 7] * 2


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_refuse_a_group_of_one(name: str) -> None:
    with pytest.raises(ValueError, match="at least 2 samples"):
        ADVANTAGES[name](torch.zeros(3, 1))
