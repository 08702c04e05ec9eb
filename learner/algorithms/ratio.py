"""The importance ratio of two log-probabilities."""

from torch import Tensor

_MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return logprobs - old, clamped to +-20 so that exp stays finite."""
    return (logprobs - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
