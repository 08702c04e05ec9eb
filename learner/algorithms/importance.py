"""The importance ratio of two log-probabilities, and the corrections of the behaviour policy that bound it.

A new correction is a function here and a line in `by_name.py`. Shape: K model tokens of a micro-batch, flat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return logprobs - old, clamped to +-20 so that exp stays finite."""
    return (logprobs - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def trajectory_means(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Return for each token the mean over its trajectory's model tokens; the gradient goes through it.

    values: [K], the trajectories end to end. counts: model tokens of each, in order; their sum is K. Returns [K].
    """
    means = [part.mean().expand(len(part)) for part in torch.split(values, list(counts)) if len(part)]
    return torch.cat(means) if means else values


@dataclass(frozen=True)
class Band:
    """Bounds of an importance weight."""

    low: float  # smaller weights are masked; not used by `keep_truncated`
    high: float  # larger weights are truncated to it, or masked


@dataclass(frozen=True)
class Correction:
    """A correction that settings can name."""

    # (importance weights [K], model tokens of each trajectory, band) -> the share of each weight that is trusted [K]
    kept: Callable[[Tensor, Sequence[int], Band], Tensor]
    is_weighted: bool  # the loss is multiplied with the importance weight; False: masked only
    band: Band = Band(low=0.5, high=2.0)  # default bounds


def token_weights(
    correction: Correction, weight: Tensor, counts: Sequence[int], band: Band, *, is_in_loss: bool
) -> Tensor:
    """Return the factor of each token's loss [K].

    weight: [K], probability of the token under the target policy over that under the behaviour policy. counts: model
    tokens of each trajectory, in order. is_in_loss: the loss contains this ratio already, so only the trusted share is
    applied.
    Example: a weight of 4 cut at 2 gives 0.5 when the loss contains the weight, and 2 otherwise.
    """
    kept = correction.kept(weight, counts, band)
    return kept * weight if correction.is_weighted and not is_in_loss else kept


def keep_all(weight: Tensor, counts: Sequence[int], band: Band) -> Tensor:
    """Return 1 for every token, whatever its importance weight [K]: no correction."""
    return torch.ones_like(weight)


def keep_truncated(weight: Tensor, counts: Sequence[int], band: Band) -> Tensor:
    """Return min(w, high) / w: the share of each importance weight that remains below the bound band.high.

    weight: [K], above 0. Source: truncated importance sampling, IMPALA's rho-bar, arXiv:1802.01561, section 4.1.
    """
    return (band.high / weight).clamp(max=1.0)


def keep_in_band(weight: Tensor, counts: Sequence[int], band: Band) -> Tensor:
    """Return 1 where the importance weight [K] lies in [low, high], 0 elsewhere. Source: IcePop."""
    return ((weight >= band.low) & (weight <= band.high)).to(weight.dtype)


def keep_near_answers(weight: Tensor, counts: Sequence[int], band: Band) -> Tensor:
    """Return 1 for the tokens of an answer with a geometric mean weight in [low, high], 0 for the others.

    weight: [K], above 0. counts: model tokens of each trajectory, in order. This catches a thousand tokens that are
    each 2 % too likely, although each alone looks harmless.
    Source: "When speed kills stability" (Liu et al., 2025), geometric sequence masking.
    """
    mean = trajectory_means(weight.log(), counts).exp()
    return ((mean >= band.low) & (mean <= band.high)).to(weight.dtype)
