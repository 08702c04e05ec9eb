"""RLOO's advantage."""

from torch import Tensor

from learner.algorithms.advantages.advantage import distances


def rloo_advantages(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return each reward's distance from the mean of its group's other rewards.

    rewards: [P, G] float; lengths play no part. Returns [P, G].
    Raises: ValueError when G < 2. Source: RLOO, arXiv:2402.14740.
    """
    num_others = rewards.shape[1] - 1
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / num_others
    return distances(rewards, others)
