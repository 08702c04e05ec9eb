"""The soft penalty of answers near their token limit."""

from torch import Tensor


def overlong_penalty(lengths: Tensor, most: int, buffer: int, factor: float) -> Tensor:
    """Return 0 up to `most - buffer` tokens, then falling to -factor at `most`, and -factor beyond.

    lengths: [N] float64, model tokens of each trajectory.
    Returns [N]: -min(length - (most - buffer), buffer) / buffer * factor.
    Example: most 100, buffer 20, factor 1 gives 0 at 80 tokens, -0.5 at 90, -1 at 100 and at 120.
    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    return -(lengths - (most - buffer)).clamp(0.0, buffer) / buffer * factor
