"""Policy losses and behaviour corrections, per token.

Called by `learner.step` through the LOSSES and CORRECTIONS dicts. Shape: K model tokens of a micro-batch, flat.
logprobs are natural logs; `old` is what the ratio is taken against, `behaviour` the sampling engine's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0
_DUAL_CLIP = 3.0
_TIS_CAP = 2.0
_ICEPOP_BAND = (0.5, 2.0)


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


def reinforce_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return (-A logp [K], no token clipped [K]). Source: REINFORCE; `old` and `clip` play no part."""
    return -advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool)


def no_correction(ratio: Tensor) -> Tensor:
    """Return a weight of 1 for every token."""
    return torch.ones_like(ratio)


def truncated_weights(ratio: Tensor) -> Tensor:
    """Return min(w, 2): truncated importance sampling of the old policy under the behaviour policy. ratio: [K]."""
    return ratio.clamp(max=_TIS_CAP)


def icepop_weights(ratio: Tensor) -> Tensor:
    """Return w inside [0.5, 2] and 0 outside. ratio: [K]."""
    low, high = _ICEPOP_BAND
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return logprobs - old, clamped to +-20 so that exp stays finite."""
    return (logprobs - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Clip], tuple[Tensor, Tensor]]] = {
    "ppo": ppo_loss,
    "reinforce": reinforce_loss,
}
CORRECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": no_correction,
    "tis": truncated_weights,
    "icepop": icepop_weights,
}
