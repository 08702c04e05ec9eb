"""The interface of advantages: a function of a group's rewards, or of one trajectory's tokens.

Shapes: P prompts, G samples of each, K model tokens of one trajectory in order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# (rewards [P, G] float64, model tokens of each sample [P, G] float64) -> advantages [P, G], one per sample
OfGroups = Callable[[Tensor, Tensor], Tensor]

# (rewards [K] float64, values [K] float64 or None, gamma, lambda) -> advantages [K]. Only model tokens are among the K.
OfTokens = Callable[[Tensor, Tensor | None, float, float], Tensor]


@dataclass(frozen=True)
class Advantage:
    """An advantage that settings can name: exactly one of the two functions."""

    of_groups: OfGroups | None = None  # estimate per sample, from its group's rewards
    of_tokens: OfTokens | None = None  # estimate per token, from its own trajectory's rewards
    needs_critic: bool = False  # of_tokens receives values
    is_whitened: bool = False  # advantages of a step are scaled to mean 0 and deviation 1 over all model tokens
    min_group: int = 1  # smallest number of samples per prompt

    def __post_init__(self) -> None:
        if (self.of_groups is None) == (self.of_tokens is None):
            raise ValueError("an advantage has either of_groups or of_tokens")


def check_group(rewards: Tensor) -> None:
    if rewards.shape[1] < 2:
        raise ValueError("a group needs at least 2 samples: one sample has no group to be compared with")


def is_equal(rewards: Tensor) -> Tensor:
    return rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)


def distances_from_mean(rewards: Tensor) -> Tensor:
    """Exactly zero for equal rewards: rounding in the mean would otherwise be divided by a deviation of 1e-6."""
    return torch.where(is_equal(rewards), torch.zeros_like(rewards), rewards - rewards.mean(dim=1, keepdim=True))
