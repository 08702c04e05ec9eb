"""Importance weights of token losses, which correct samples of the behaviour policy.

Shape: K model tokens of a micro-batch, flat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from learner.algorithms.corrections.band import Band

_OF_TOKENS = Band(low=0.5, high=2.0)


@dataclass(frozen=True)
class Correction:
    """A correction that settings can name."""

    # (importance weights [K], model tokens of each trajectory, band) -> the share of each weight that is trusted [K]
    kept: Callable[[Tensor, Sequence[int], Band], Tensor]
    is_weighted: bool  # the loss is multiplied with the importance weight; False: masked only
    band: Band = _OF_TOKENS  # default bounds


def token_weights(
    correction: Correction, weight: Tensor, counts: Sequence[int], band: Band, *, is_in_loss: bool
) -> Tensor:
    """Return the factor of each token's loss [K].

    weight: [K], probability of the token under the target policy over that under the behaviour policy. counts: model
    tokens of each trajectory, in order. is_in_loss: the loss contains this ratio already, so only the trusted share is
    applied.
    Example: a weight of 4 cut at 2 gives 0.5 when the loss contains the weight, and 2 otherwise.
    """
    kept = correction.kept(weight, counts, band)
    return kept * weight if correction.is_weighted and not is_in_loss else kept
