"""The critic's loss."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return (0.5 max((V - R)^2, (clip(V, Vold - clip, Vold + clip) - R)^2) [K], whether it was clipped [K] bool).

    values, old_values, returns: [K]. old_values: before the step's first update.
    Source: "The 37 implementation details of PPO" (2022), detail 9; the clip of arXiv:1707.06347 applied to values.
    """
    clipped = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    free_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    return 0.5 * torch.maximum(free_error, clipped_error), clipped_error > free_error
