"""REINFORCE++'s advantage with the group's mean as its baseline."""

from torch import Tensor

from learner.algorithms.advantages.advantage import distances


def reinforce_pp_baseline_advantages(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return each reward's distance from its group's mean, to be whitened over the whole step.

    GRPO divides by each group's own deviation, so nearly equal rewards weigh as much as any. The whitening divides
    all groups by the same number.
    rewards: [P, G] float; lengths play no part. Returns [P, G]. Raises: ValueError when G < 2.
    Source: REINFORCE++, arXiv:2501.03262, section 3.2 (REINFORCE++-baseline).
    """
    return distances(rewards, rewards.mean(dim=1, keepdim=True))
