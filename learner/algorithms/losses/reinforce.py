"""REINFORCE's loss."""

import torch
from torch import Tensor

from learner.algorithms.losses.clipped import Clip


def reinforce_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return (-A logp [K], no token clipped [K]). Source: REINFORCE; `old` and `clip` play no part."""
    return -advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool)
