"""Generalised advantage estimation."""

import torch
from torch import Tensor

from learner.algorithms.advantages.discounted import discounted_sums


def gae_advantages(rewards: Tensor, values: Tensor | None, gamma: float, lam: float) -> Tensor:
    """Return A_t = d_t + gamma * lam * A_(t+1), where d_t = R_t + gamma * V_(t+1) - V_t; both are 0 after the last.

    rewards: [K] float64, of one trajectory's model tokens in order; values: [K], the critic's. Returns [K] float64.
    The critic's targets are A_t + V_t. Tokens of prompts and replies are not among the K: a turn's last token is
    followed by the next turn's first, without a discount for the tokens in between.
    Source: arXiv:1506.02438, eq. 16.
    """
    assert values is not None, "gae needs a critic's values"
    values = values.to(torch.float64)
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    return discounted_sums(rewards + gamma * following - values, gamma * lam)
