"""Dr. GRPO's advantage."""

from torch import Tensor

from learner.algorithms.advantages.advantage import check_group, distances_from_mean


def dr_grpo_advantages(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return each reward's distance from its group's mean.

    rewards: [P, G] float; lengths play no part. Returns [P, G].
    Raises: ValueError when G < 2. Source: Dr. GRPO, arXiv:2503.20783.
    """
    check_group(rewards)
    return distances_from_mean(rewards)
