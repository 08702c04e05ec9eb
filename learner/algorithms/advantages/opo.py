"""OPO's advantage. Its baseline minimises the variance of the gradient, which grows with an answer's length."""

from torch import Tensor

from learner.algorithms.advantages.advantage import distances


def opo_advantages(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return each reward's distance from sum(length * reward) / sum(length) of its group.

    rewards, lengths: [P, G] float, lengths in model tokens. Returns [P, G]. Raises: ValueError when G < 2.
    Source: OPO, arXiv:2505.23585, eq. 9.
    """
    baseline = (lengths * rewards).sum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True).clamp(min=1.0)
    return distances(rewards, baseline)
