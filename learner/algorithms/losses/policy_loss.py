"""The interface of policy losses.

Shape: K model tokens of a micro-batch, flat. Logprobs are natural logs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """Bounds of the importance ratio."""

    low: float  # distance below 1 at which the ratio is clipped
    high: float  # distance above 1 at which the ratio is clipped
    dual: float  # largest loss for a negative advantage A, in units of |A|; infinite: no limit


# (learner's logprobs, old logprobs, advantages, counts, clip) -> (loss [K], whether it was clipped [K] bool).
# counts: model tokens of each trajectory, in order; their sum is K. Only losses of whole answers use them.
LossOfTokens = Callable[[Tensor, Tensor, Tensor, Sequence[int], Clip], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PolicyLoss:
    """A loss that settings can name."""

    of_tokens: LossOfTokens  # loss of each token, before its weight
    has_ratio: bool  # the loss contains the ratio learner / old, and so corrects for the old policy
