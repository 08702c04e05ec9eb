"""No behaviour correction."""

import torch
from torch import Tensor


def no_correction(ratio: Tensor) -> Tensor:
    """Return a weight of 1 for every token."""
    return torch.ones_like(ratio)
