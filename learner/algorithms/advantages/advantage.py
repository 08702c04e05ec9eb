"""The interface of advantages: a function of a group's rewards, or of one trajectory's tokens.

Shapes: P prompts (a run passes one at a time), G samples of each, K model tokens of one trajectory in order.
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

    def __post_init__(self) -> None:
        if (self.of_groups is None) == (self.of_tokens is None):
            raise ValueError("an advantage has either of_groups or of_tokens")
        if self.needs_critic and self.of_tokens is None:
            raise ValueError("needs_critic is of of_tokens, which gets the critic's values: of_groups gets none")


def distances(rewards: Tensor, baseline: Tensor) -> Tensor:
    """Return rewards [P, G] less their baseline ([P, 1] or [P, G]), and exactly 0 in a group of equal rewards.

    There the baseline's rounding error would otherwise be divided by a deviation of 1e-6.
    Raises: ValueError when G < 2.
    """
    if rewards.shape[1] < 2:
        raise ValueError("a group needs at least 2 samples: one sample has no group to be compared with")
    is_equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return torch.where(is_equal, torch.zeros_like(rewards), rewards - baseline)
