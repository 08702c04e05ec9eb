"""REINFORCE's loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithms.losses.policy_loss import Clip


def reinforce_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, counts: Sequence[int], clip: Clip
) -> tuple[Tensor, Tensor]:
    """Return (-A logp [K], no token clipped [K]). `old`, `counts` and `clip` play no part.

    Source: Williams, "Simple statistical gradient-following algorithms" (1992).
    """
    return -advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool)
