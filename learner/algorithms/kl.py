"""Estimators of the policy's KL divergence from a reference, per token, and the controller of its coefficient.

K: tokens of a micro-batch that the model wrote. d = logprobs - reference, in nats: [K]. Each estimate is clamped to
+-10, beyond which its gradient is 0.

Source: Schulman, "Approximating KL divergence" (2020); the controller, arXiv:1909.08593, section 2.2.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from learner.algorithms.importance import log_ratio

_MAX_ESTIMATE = 10.0  # bound of one token's estimate, in either direction
_MAX_ERROR = 0.2  # bound of the controller's relative error


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return d [K]: unbiased, of either sign. Useless as a loss: its gradient has mean 0."""
    return _clamp(log_ratio(logprobs, reference))


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return d^2 / 2 [K]: biased, never negative. On fresh samples its gradient is that of the divergence."""
    return _clamp(0.5 * log_ratio(logprobs, reference).square())


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d [K]: unbiased and never negative."""
    d = log_ratio(logprobs, reference)
    return _clamp(torch.expm1(-d) + d)


KL_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def next_coefficient(coefficient: float, kl: float, num_trajectories: int, target: float, horizon: float) -> float:
    """Return beta * (1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon): larger where the KL is above its target.

    kl: mean over a step's model tokens, and target: in nats per token. num_trajectories: of that step. horizon:
    trajectories over which an error of 20 % moves the coefficient by 20 %.
    """
    error = min(_MAX_ERROR, max(-_MAX_ERROR, kl / target - 1.0))
    return coefficient * (1.0 + error * num_trajectories / horizon)


def _clamp(estimates: Tensor) -> Tensor:
    return estimates.clamp(-_MAX_ESTIMATE, _MAX_ESTIMATE)
