"""No behaviour correction."""

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithms.corrections.band import Band


def keep_all(weight: Tensor, counts: Sequence[int], band: Band) -> Tensor:
    """Return 1 for every token, whatever its importance weight [K]."""
    return torch.ones_like(weight)
