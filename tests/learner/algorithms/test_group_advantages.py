"""Advantages of groups against slow loops written from their formulas, in float64."""

import math
from collections.abc import Callable

import pytest
import torch

from learner.algorithms.by_name import ADVANTAGES

REWARDS = [[0.0, 1.0, 0.25, 7.0], [-3.0, 2.0, 2.0, 2.0], [0.1, 0.1, 0.1, 0.1]]
LENGTHS = [[10.0, 2.0, 7.0, 1.0], [3.0, 4.0, 5.0, 6.0], [1.0, 900.0, 30.0, 2.0]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def grpo(rewards: list[float], _: list[float]) -> list[float]:
    std = math.sqrt(sum((r - mean(rewards)) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean(rewards)) / (std + 1e-6) for r in rewards]


def distances(rewards: list[float], _: list[float]) -> list[float]:
    return [r - mean(rewards) for r in rewards]


def rloo(rewards: list[float], _: list[float]) -> list[float]:
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


def opo(rewards: list[float], lengths: list[float]) -> list[float]:
    baseline = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


SLOW: dict[str, Callable[[list[float], list[float]], list[float]]] = {
    "grpo": grpo,
    "dr_grpo": distances,
    "reinforce_pp_baseline": distances,
    "rloo": rloo,
    "opo": opo,
}


def advantages_of(name: str, rewards: list[list[float]], lengths: list[list[float]]) -> list[list[float]]:
    estimate = ADVANTAGES[name].of_groups
    assert estimate is not None
    found: list[list[float]] = estimate(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths, dtype=torch.float64)
    ).tolist()
    return found


@pytest.mark.parametrize("name", SLOW)
def test_advantage_equals_the_slow_loop(name: str) -> None:
    found = advantages_of(name, REWARDS, LENGTHS)
    for group, rewards, lengths in zip(found, REWARDS, LENGTHS, strict=True):
        assert group == pytest.approx(SLOW[name](rewards, lengths), rel=0, abs=1e-12)


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("reward", [0.0, 0.1, -1e6])
def test_equal_rewards_give_exactly_zero(name: str, reward: float) -> None:
    assert advantages_of(name, [[reward] * 7] * 2, [[float(n) for n in range(7)]] * 2) == [[0.0] * 7] * 2


@pytest.mark.parametrize("name", SLOW)
def test_group_of_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a group needs at least 2 samples"):
        advantages_of(name, [[1.0]], [[1.0]])
