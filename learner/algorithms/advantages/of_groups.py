"""Parts of the advantages that compare a sample with the other samples of its prompt.

Shapes: P prompts, G samples of each.
"""

import torch
from torch import Tensor


def check_group(rewards: Tensor) -> None:
    if rewards.shape[1] < 2:
        raise ValueError("a group needs at least 2 samples: one sample has no group to be compared with")


def is_equal(rewards: Tensor) -> Tensor:
    return rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)


def distances_from_mean(rewards: Tensor) -> Tensor:
    """Exactly zero for equal rewards: rounding in the mean would otherwise be divided by a deviation of 1e-6."""
    return torch.where(is_equal(rewards), torch.zeros_like(rewards), rewards - rewards.mean(dim=1, keepdim=True))
