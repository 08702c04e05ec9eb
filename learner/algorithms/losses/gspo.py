"""GSPO's loss: PPO's clipped loss with one ratio per answer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithms.importance import log_ratio, trajectory_means
from learner.algorithms.losses.policy_loss import Clip


def gspo_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, counts: Sequence[int], clip: Clip
) -> tuple[Tensor, Tensor]:
    """Return (-min(s A, clip(s, 1 - low, 1 + high) A) [K], whether it was clipped [K] bool).

    s: exp of the mean over an answer's tokens of logp - old, each within +-20; the gradient flows through it.
    logprobs, old, advantages: [K], with one advantage per answer. Every token of an answer gets the answer's loss, so
    `seq_mean_token_mean` gives the paper's mean over answers. clip.dual plays no part.
    Source: GSPO, arXiv:2507.18071, eq. 5 to 7.
    """
    ratio = trajectory_means(log_ratio(logprobs, old), counts).exp()
    free = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    return torch.maximum(free, clipped), clipped > free
