"""Aggregation of token losses: the weight of each trajectory's summed loss.

Shape: N trajectories of one update, over all ranks. A trajectory without model tokens has weight 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def token_mean(counts: Tensor, constant: float) -> Tensor:
    """Every token counts the same. Source: DAPO, arXiv:2503.14476, eq. 8."""
    return _per_trajectory(counts, 1.0 / counts.sum().clamp(min=1.0))


def seq_mean_token_mean(counts: Tensor, constant: float) -> Tensor:
    """Every trajectory counts the same, so that a token of a long one counts less. Source: GRPO, arXiv:2402.03300."""
    return _per_trajectory(counts, 1.0 / (_num_trained(counts) * counts.clamp(min=1.0)))


def seq_mean_token_sum(counts: Tensor, constant: float) -> Tensor:
    """The mean over trajectories of the sum over tokens: the policy gradient of whole answers."""
    return _per_trajectory(counts, 1.0 / _num_trained(counts))


def seq_sum_norm(counts: Tensor, constant: float) -> Tensor:
    """The mean over trajectories of the sum over tokens, divided by a constant, so that no length is favoured.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2; its constant is the token limit of an answer.
    """
    return _per_trajectory(counts, 1.0 / (_num_trained(counts) * constant))


# (model tokens of every trajectory [N] float64, constant) -> weights [N] float64. The loss of an update is the sum of
# weights[n] * (sum of the losses of trajectory n's tokens), and nothing divides it further.
AGGREGATES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_sum_norm": seq_sum_norm,
}


def divisor_of(name: str, counts: Tensor) -> float:
    """Return what the other trajectories of an update contribute to an aggregate's weights: tokens or trajectories.

    A weight times it depends on the trajectory alone, so that an update can add the gradients of its parts, and divide
    by the sum of their divisors.
    """
    return float(counts.sum() if name == "token_mean" else (counts > 0).sum())


def _num_trained(counts: Tensor) -> Tensor:
    return (counts > 0).sum().clamp(min=1).to(counts.dtype)


def _per_trajectory(counts: Tensor, weight: Tensor) -> Tensor:
    return torch.where(counts > 0, weight, torch.zeros_like(counts))
