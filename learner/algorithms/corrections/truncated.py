"""Truncated importance sampling."""

from torch import Tensor

_TIS_CAP = 2.0


def truncated_weights(ratio: Tensor) -> Tensor:
    """Return min(w, 2): truncated importance sampling of the old policy under the behaviour policy. ratio: [K]."""
    return ratio.clamp(max=_TIS_CAP)
