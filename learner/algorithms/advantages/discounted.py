"""Discounted sums over the tokens that follow."""

import torch
from torch import Tensor


def discounted_sums(values: Tensor, factor: float) -> Tensor:
    """Return S_t = x_t + factor * S_(t+1) for each token; S is 0 after the last one.

    values: [K] float64, one trajectory's model tokens in order. Returns [K] float64.
    """
    sums, following = [], 0.0
    for value in reversed(values.tolist()):
        following = value + factor * following
        sums.append(following)
    return torch.tensor(sums[::-1], dtype=torch.float64)
