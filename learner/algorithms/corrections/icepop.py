"""IcePop's behaviour correction: tokens with an importance weight out of band are masked."""

from collections.abc import Sequence

from torch import Tensor

from learner.algorithms.corrections.band import Band


def keep_in_band(weight: Tensor, counts: Sequence[int], band: Band) -> Tensor:
    """Return 1 where the importance weight lies in [low, high], 0 elsewhere. weight: [K]."""
    return ((weight >= band.low) & (weight <= band.high)).to(weight.dtype)
