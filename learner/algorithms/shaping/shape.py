"""Shaping of a step's rewards. Shape: N trajectories of the step, over all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.shaping.overlong import overlong_penalty
from learner.algorithms.shaping.running_moments import RunningMoments
from protocol.settings.rewards import RewardsSettings


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
