"""IcePop's behaviour correction: a token whose ratio is out of band does not count."""

import torch
from torch import Tensor

_ICEPOP_BAND = (0.5, 2.0)


def icepop_weights(ratio: Tensor) -> Tensor:
    """Return w inside [0.5, 2] and 0 outside. ratio: [K]."""
    low, high = _ICEPOP_BAND
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
