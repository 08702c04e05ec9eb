"""Dr. GRPO's advantage."""

from torch import Tensor

from learner.algorithms.advantages.advantage import distances


def dr_grpo_advantages(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return each reward's distance from its group's mean.

    rewards: [P, G] float; lengths play no part. Returns [P, G].
    Raises: ValueError when G < 2. Source: Dr. GRPO, arXiv:2503.20783.
    """
    return distances(rewards, rewards.mean(dim=1, keepdim=True))
