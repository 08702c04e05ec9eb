"""Whether what is about to be pushed or saved is finite.

A step checks its loss and gradient; this finds what got into the weights in any other way: a flipped bit, a kernel that
went wrong, an optimizer's moment that was not finite.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class NonFiniteWeightsError(RuntimeError):
    """A weight or optimizer state is not finite: nothing was pushed or saved; go on from the last checkpoint."""


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, or None. One read of each, nothing allocated."""
    for name, tensor in named:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = torch.aminmax(tensor.detach())  # a NaN anywhere makes both NaN
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            return name
    return None
