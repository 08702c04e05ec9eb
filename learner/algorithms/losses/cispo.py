"""CISPO's loss: REINFORCE with a clipped importance weight, so that no token loses its gradient."""

from collections.abc import Sequence

from torch import Tensor

from learner.algorithms.importance import log_ratio
from learner.algorithms.losses.policy_loss import Clip


def cispo_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, counts: Sequence[int], clip: Clip
) -> tuple[Tensor, Tensor]:
    """Return (-min(r, 1 + high) A logp [K] with no gradient through r, whether r was clipped [K] bool).

    logprobs, old, advantages: [K]; counts, clip.low and clip.dual play no part. Source: MiniMax-M1, arXiv:2506.13585,
    eq. 4 and 5.
    """
    ratio = log_ratio(logprobs.detach(), old).exp()
    largest = 1.0 + clip.high
    return -ratio.clamp(max=largest) * advantages * logprobs, ratio > largest
