"""A behaviour correction of whole answers: an answer that drifted on average is masked."""

from collections.abc import Sequence

from torch import Tensor

from learner.algorithms.corrections.band import Band
from learner.algorithms.trajectory_means import trajectory_means


def keep_near_answers(weight: Tensor, counts: Sequence[int], band: Band) -> Tensor:
    """Return 1 for the tokens of an answer with a geometric mean weight in [low, high], 0 for the others.

    weight: [K], above 0. counts: model tokens of each trajectory, in order. This catches a thousand tokens that are
    each 2 % too likely, although each alone looks harmless.
    Source: "When speed kills stability" (Liu et al., 2025), geometric sequence masking.
    """
    mean = trajectory_means(weight.log(), counts).exp()
    return ((mean >= band.low) & (mean <= band.high)).to(weight.dtype)
