"""IcePop's behaviour correction: a token whose importance weight is out of band does not count."""

from collections.abc import Sequence

from torch import Tensor

from learner.algorithms.corrections.band import Band


def keep_in_band(weight: Tensor, counts: Sequence[int], band: Band) -> Tensor:
    """Return 1 for a token whose importance weight lies in [low, high], 0 for any other. weight: [K]."""
    return ((weight >= band.low) & (weight <= band.high)).to(weight.dtype)
