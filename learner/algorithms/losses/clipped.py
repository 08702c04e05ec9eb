"""Policy losses and behaviour corrections, per token.

Shape: K model tokens of a micro-batch, flat.
logprobs are natural logs; `old` is what the ratio is taken against, `behaviour` the sampling engine's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.ratio import log_ratio

_DUAL_CLIP = 3.0


@dataclass(frozen=True)
class Clip:
    """The ratio is clipped to [1 - low, 1 + high]."""

    low: float
    high: float


def ppo_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return (loss [K], whether the clip took the gradient away [K] bool).

    logprobs, old, advantages: [K]. Dual clip: for a negative advantage the loss is at most 3 |A|.
    Source: PPO, arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729, eq. 5; clip-higher, arXiv:2503.14476.
    """
    ratio = log_ratio(logprobs, old).exp()
    free = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    loss = torch.maximum(free, clipped)
    ceiling = -_DUAL_CLIP * advantages
    is_capped = (advantages < 0) & (loss > ceiling)
    return torch.where(is_capped, ceiling, loss), (clipped > free) | is_capped
