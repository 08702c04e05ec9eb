"""GRPO's advantage."""

from torch import Tensor

from learner.algorithms.advantages.advantage import distances

_EPSILON = 1e-6


def grpo_advantages(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return each reward's distance from its group's mean, in group standard deviations.

    rewards: [P, G] float; lengths play no part. Returns [P, G]. Equal rewards give zeros.
    Raises: ValueError when G < 2.
    Source: GRPO, arXiv:2402.03300, eq. 3; unbiased standard deviation plus 1e-6.
    """
    return distances(rewards, rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + _EPSILON)
