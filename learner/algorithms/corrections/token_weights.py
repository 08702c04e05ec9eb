"""What a token's loss is multiplied with, so that samples of the behaviour policy count as samples of another one.

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
    is_weighted: bool  # False: the importance weight itself is left out as well
    band: Band = _OF_TOKENS  # where the settings name no other


def token_weights(
    correction: Correction, weight: Tensor, counts: Sequence[int], band: Band, *, is_in_loss: bool
) -> Tensor:
    """Return what each token's loss is multiplied with [K].

    weight: [K], how much likelier the corrected-to policy makes the token than the behaviour policy did. counts: model
    tokens of each trajectory, in order. is_in_loss: the loss is of that very ratio, so that only what the correction
    cuts away is left to be applied, and nothing where there is no correction.
    Example: a weight of 4 cut at 2 gives 0.5 for a loss that has the weight in it, and 2 for one that has not.
    """
    kept = correction.kept(weight, counts, band)
    return kept * weight if correction.is_weighted and not is_in_loss else kept
