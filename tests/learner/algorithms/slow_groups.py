"""Rewards of groups that say something about an advantage, and what holds for every one."""

import pytest
import torch
from torch import Tensor

from learner.algorithms.by_name import ADVANTAGES

REWARDS = [[1.0, 0.0, 0.0, 0.5], [0.2, 0.2, 0.2, 0.2], [-3.0, 7.0, 0.0, 1.0]]


def advantages_of(name: str, rewards: list[list[float]] = REWARDS) -> list[list[float]]:
    """Return the named advantages, computed in float64."""
    found: list[list[float]] = of_groups(name, torch.tensor(rewards, dtype=torch.float64)).tolist()
    return found


def of_groups(name: str, rewards: Tensor) -> Tensor:
    estimate = ADVANTAGES[name].of_groups
    assert estimate is not None
    return estimate(rewards, torch.ones_like(rewards))


def check_every_advantage(name: str) -> None:
    for reward in (0.0, 0.1, -1e6):
        assert of_groups(name, torch.full((2, 7), reward)).tolist() == [[0.0] * 7] * 2
    with pytest.raises(ValueError, match="at least 2 samples"):
        of_groups(name, torch.zeros(3, 1))
