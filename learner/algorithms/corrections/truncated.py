"""Truncated importance sampling."""

from collections.abc import Sequence

from torch import Tensor

from learner.algorithms.corrections.band import Band


def keep_truncated(weight: Tensor, counts: Sequence[int], band: Band) -> Tensor:
    """Return min(w, high) / w: the share of each importance weight that remains below the bound band.high.

    weight: [K], above 0. Source: truncated importance sampling, IMPALA's rho-bar, arXiv:1802.01561, section 4.1.
    """
    return (band.high / weight).clamp(max=1.0)
