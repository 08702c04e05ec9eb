"""Rewards of a step: shaped per trajectory, and placed on the last model token or on the ends of turns.

Shapes: S trajectories and K model tokens of a micro-batch, N trajectories of the step.
"""

import zlib
from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

from learner.algorithms.shaping import RunningMoments, ShapedRewards, shape_rewards
from learner.models.micro_batch import MicroBatch
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import TurnReward


def token_rewards(
    micro_batch: MicroBatch, scores: Tensor, turn_rewards: Sequence[Sequence[TurnReward]] | None = None
) -> Tensor:
    """Return each model token's reward, [K] float64. The rewards of a trajectory sum to its score.

    scores: [N] float64, of the step. turn_rewards: [N], parts of a score that belong to ends of turns; None: none.

    Example: a score of 1.0, of which 0.25 belong to a first turn of two tokens, and a second turn of one token, give
    [0.0, 0.25, 0.75].
    """
    counts = torch.tensor(micro_batch.counts)
    rewards = torch.zeros(int(counts.sum()), dtype=torch.float64)
    last = counts.cumsum(0) - 1
    has_tokens = counts > 0
    numbers = torch.tensor(micro_batch.numbers)[has_tokens]
    rewards[last[has_tokens]] = scores[numbers]
    start = 0
    for place, number in enumerate(micro_batch.numbers if turn_rewards is not None else ()):
        first, count = int(last[place] + 1 - counts[place]), int(counts[place])
        places = micro_batch.predict_at[first : first + count] + 1 - start  # of its model tokens, in the trajectory
        for turn in turn_rewards[number] if turn_rewards is not None and number >= 0 else ():
            rewards[first + int(torch.searchsorted(places, turn.end - 1))] += turn.reward
            rewards[last[place]] -= turn.reward
        start += micro_batch.lengths[place]
    return rewards


def trajectory_sums(micro_batch: MicroBatch, of_tokens: Tensor, num_trajectories: int) -> Tensor:
    """Return the sum over each trajectory's tokens [N], 0 for trajectories of other micro-batches. of_tokens: [K]."""
    sums = torch.zeros(num_trajectories, dtype=torch.float64)
    for number, part in zip(micro_batch.numbers, torch.split(of_tokens, list(micro_batch.counts)), strict=True):
        if number >= 0:
            sums[number] += part.sum()
    return sums


_MOMENTS = ("reward_count", "reward_mean", "reward_squares")
_SOURCE = "reward_source"  # CRC-32 of `RewardsSettings.reward_source`
# Finish reasons of truncated trajectories: a turn's token limit, the context limit, the time limit.
_TRUNCATED = ("length", "context", "time")


def shaped_rewards(batch: Batch, settings: Settings, memory: MutableMapping[str, float]) -> ShapedRewards:
    """Return the step's shaped rewards, the same on every rank. memory: keeps the running moments of rewards."""
    facts = batch.facts
    source = float(zlib.crc32(settings.rewards.reward_source(settings.rollout.environment).encode()))
    # Rewards of another source, or of one that a checkpoint of 0.1.0 does not name, say nothing about these.
    is_same = memory.get(_SOURCE) == source
    count, mean, squares = (memory.get(name, 0.0) if is_same else 0.0 for name in _MOMENTS)
    shaped = shape_rewards(
        torch.tensor([each.reward for each in facts], dtype=torch.float64),
        torch.tensor([each.num_model_tokens for each in facts], dtype=torch.float64),
        torch.tensor([each.finish in _TRUNCATED for each in facts], dtype=torch.bool),
        RunningMoments(count, mean, squares),
        settings.rewards,
        settings.rollout.max_response_tokens,
    )
    if settings.rewards.normalize:
        moments = shaped.moments
        memory[_SOURCE] = source
        memory.update(zip(_MOMENTS, (moments.count, moments.mean, moments.squares), strict=True))
    return shaped
