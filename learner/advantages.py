"""Advantages of the samples of a group: how much better each was than what the prompt usually gives.

Called by `learner.step` with the rewards of every group of a step. Shapes: P prompts, G samples of each.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_EPSILON = 1e-6


def grpo_advantages(rewards: Tensor) -> Tensor:
    """Return each reward's distance from its group's mean, in group standard deviations.

    rewards: [P, G] float. Returns [P, G]. A group whose rewards are all equal gives zeros.
    Raises: ValueError when G < 2.
    Source: GRPO, arXiv:2402.03300, eq. 3; unbiased standard deviation plus 1e-6.
    """
    _check_group(rewards)
    return _centred(rewards) / (rewards.std(dim=1, keepdim=True) + _EPSILON)


def dr_grpo_advantages(rewards: Tensor) -> Tensor:
    """Return each reward's distance from its group's mean.

    rewards: [P, G] float. Returns [P, G]. Raises: ValueError when G < 2. Source: Dr. GRPO, arXiv:2503.20783.
    """
    _check_group(rewards)
    return _centred(rewards)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """Return each reward's distance from the mean of its group's other rewards.

    rewards: [P, G] float. Returns [P, G]. Raises: ValueError when G < 2. Source: RLOO, arXiv:2402.14740.
    """
    _check_group(rewards)
    num_others = rewards.shape[1] - 1
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / num_others
    return torch.where(_is_equal(rewards), torch.zeros_like(rewards), rewards - others)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
}


def _check_group(rewards: Tensor) -> None:
    if rewards.shape[1] < 2:
        raise ValueError("a group needs at least 2 samples: one sample has no group to be compared with")


def _is_equal(rewards: Tensor) -> Tensor:
    return rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)


def _centred(rewards: Tensor) -> Tensor:
    """Exactly zero for equal rewards: rounding in the mean would otherwise be divided by a deviation of 1e-6."""
    return torch.where(_is_equal(rewards), torch.zeros_like(rewards), rewards - rewards.mean(dim=1, keepdim=True))
