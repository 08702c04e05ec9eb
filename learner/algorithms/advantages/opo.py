"""OPO's advantage: the baseline that makes the gradient's variance least, when longer answers vary more."""

import torch
from torch import Tensor

from learner.algorithms.advantages.advantage import check_group, is_equal


def opo_advantages(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return each reward's distance from sum(length * reward) / sum(length) of its group.

    rewards, lengths: [P, G] float, lengths in model tokens. Returns [P, G]. Raises: ValueError when G < 2.
    Source: OPO, arXiv:2505.23585, eq. 9.
    """
    check_group(rewards)
    baseline = (lengths * rewards).sum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True).clamp(min=1.0)
    return torch.where(is_equal(rewards), torch.zeros_like(rewards), rewards - baseline)
