"""Means of token values over whole trajectories."""

from collections.abc import Sequence

import torch
from torch import Tensor


def trajectory_means(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Return for each token the mean over its trajectory's model tokens; the gradient goes through it.

    values: [K], the trajectories end to end. counts: model tokens of each, in order; their sum is K. Returns [K].
    """
    means = [part.mean().expand(len(part)) for part in torch.split(values, list(counts)) if len(part)]
    return torch.cat(means) if means else values
