"""Shaping of a step's rewards. Shape: N trajectories of the step, over all ranks."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.settings.rewards import RewardsSettings

_EPSILON = 1e-8


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and spread of all rewards so far. The checkpoint holds them."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def after(self, rewards: Tensor) -> "RunningMoments":
        """Return the moments with these rewards [N] added. Source: Chan, Golub, LeVeque (1979), eq. 2.1."""
        if not len(rewards):
            return self
        new, mean = float(len(rewards)), float(rewards.mean())
        count, difference = self.count + new, mean - self.mean
        squares = float((rewards - mean).square().sum())
        return RunningMoments(
            count=count,
            mean=self.mean + difference * new / count,
            squares=self.squares + squares + difference**2 * self.count * new / count,
        )

    def normalise(self, rewards: Tensor) -> Tensor:
        """Return (rewards [N] - mean) / (unbiased deviation + 1e-8)."""
        deviation = math.sqrt(self.squares / max(1.0, self.count - 1.0))
        return (rewards - self.mean) / (deviation + _EPSILON)


@dataclass(frozen=True)
class ShapedRewards:
    """A step's rewards after shaping."""

    rewards: Tensor  # [N] float64
    is_trained: Tensor  # [N] bool, false: the trajectory's tokens are in no loss
    moments: RunningMoments  # moments that the next step starts with


def shape_rewards(
    rewards: Tensor,
    lengths: Tensor,
    is_truncated: Tensor,
    moments: RunningMoments,
    settings: RewardsSettings,
    max_response_tokens: int,
) -> ShapedRewards:
    """Return the rewards normalised, then clipped, then less the penalties for long and for truncated answers.

    rewards: [N] float64, of the reward services. lengths: [N] float64, model tokens. is_truncated: [N] bool, ended by
    a token limit. Every rank calls it with the whole step and gets the same result.
    """
    shaped = rewards
    if settings.normalize:
        moments = moments.after(rewards)
        shaped = moments.normalise(shaped)
    if settings.clip is not None:
        shaped = shaped.clamp(-settings.clip, settings.clip)
    if settings.overlong_buffer_tokens:
        most = settings.overlong_max_tokens or max_response_tokens
        shaped = shaped + overlong_penalty(lengths, most, settings.overlong_buffer_tokens, settings.overlong_penalty)
    if settings.truncated == "penalise":
        shaped = shaped - settings.truncated_penalty * is_truncated.to(shaped.dtype)
    is_left_out = is_truncated if settings.truncated == "mask" else torch.zeros_like(is_truncated)
    return ShapedRewards(shaped, ~is_left_out, moments)


def overlong_penalty(lengths: Tensor, most: int, buffer: int, factor: float) -> Tensor:
    """Return 0 up to `most - buffer` tokens, then falling to -factor at `most`, and -factor beyond.

    lengths: [N] float64, model tokens of each trajectory.
    Returns [N]: -min(length - (most - buffer), buffer) / buffer * factor.
    Example: most 100, buffer 20, factor 1 gives 0 at 80 tokens, -0.5 at 90, -1 at 100 and at 120.
    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    return -(lengths - (most - buffer)).clamp(0.0, buffer) / buffer * factor
