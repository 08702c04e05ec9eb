"""What every policy loss is: a function of tokens, and whether the importance ratio is in it.

Shape: K model tokens of a micro-batch, flat. Logprobs are natural logs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """Between which bounds the importance ratio moves a token's loss."""

    low: float  # the ratio is clipped below 1 - low
    high: float  # and above 1 + high
    dual: float  # for a negative advantage A the loss is at most dual * |A|; infinite: no limit


# (learner's logprobs, old logprobs, advantages, counts, clip) -> (loss [K], whether the clip cut it [K] bool).
# counts: model tokens of each trajectory, in order; their sum is K. A loss of single tokens has no use for them.
LossOfTokens = Callable[[Tensor, Tensor, Tensor, Sequence[int], Clip], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PolicyLoss:
    """A loss that settings can name."""

    of_tokens: LossOfTokens  # each token's loss, before it is weighted
    has_ratio: bool  # the loss is of the ratio learner / old, and so weighs a sample of the old policy by itself
