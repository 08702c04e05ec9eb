"""Advantages brought to mean 0 and deviation 1 over all model tokens of a step."""

from collections.abc import Callable

import torch
from torch import Tensor

_EPSILON = 1e-8

# Sums of this rank [n] float64 -> the same sums over all ranks [n].
Reduce = Callable[[Tensor], Tensor]


def whiten(advantages: Tensor, reduce: Reduce, weights: Tensor | None = None) -> Tensor:
    """Return (A - mean) / sqrt(var + 1e-8), mean and unbiased variance over the tokens of all ranks.

    advantages: [N] float64, this rank's. reduce: collective, called twice by every rank, also without tokens.
    weights: [N] float64, number of tokens that each entry counts for; None: one each. Equal advantages give zeros.
    Source: "The 37 implementation details of PPO" (2022), detail 7; REINFORCE++, arXiv:2501.03262.
    """
    weights = torch.ones_like(advantages) if weights is None else weights
    count, total = reduce(torch.stack([weights.sum(), (weights * advantages).sum()])).unbind()
    mean = total / count.clamp(min=1.0)
    # A second pass: the mean of squares less the square of the mean would lose a small variance to rounding.
    squares = reduce((weights * (advantages - mean).square()).sum()[None])[0]
    return (advantages - mean) * torch.rsqrt(squares / (count - 1.0).clamp(min=1.0) + _EPSILON)
