"""PPO's clipped loss, with clip-higher and dual clip."""

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithms.importance import log_ratio
from learner.algorithms.losses.policy_loss import Clip


def ppo_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, counts: Sequence[int], clip: Clip
) -> tuple[Tensor, Tensor]:
    """Return (loss [K], whether it was clipped and has no gradient [K] bool).

    logprobs, old, advantages: [K]; counts play no part.
    Dual clip: for a negative advantage the loss is at most clip.dual * |A|.
    Source: PPO, arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729, eq. 5; clip-higher, arXiv:2503.14476.
    """
    ratio = log_ratio(logprobs, old).exp()
    free = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    loss = torch.maximum(free, clipped)
    ceiling = -clip.dual * advantages
    is_capped = (advantages < 0) & (loss > ceiling)
    return torch.where(is_capped, ceiling, loss), (clipped > free) | is_capped
