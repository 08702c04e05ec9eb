"""The critic's loss."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return each token's loss, and whether it was clipped.

    The loss is half the larger squared error of the value and the clipped value:
    0.5 max((V - R)^2, (clip(V, Vold - clip, Vold + clip) - R)^2).
    values, old_values, returns: [K] float, K model tokens. old_values: before the step's first update.
    Returns ([K] float, [K] bool). True: the clipped value has the larger error, so the token has no gradient.
    Source: "The 37 implementation details of PPO" (2022), detail 9; the clip of arXiv:1707.06347 applied to values.
    """
    clipped = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    free_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    return 0.5 * torch.maximum(free_error, clipped_error), clipped_error > free_error
