"""The step's rewards as its advantages see them. Shape: N trajectories of the step, over all ranks."""

from collections.abc import MutableMapping

import torch

from learner.algorithms.shaping.running_moments import RunningMoments
from learner.algorithms.shaping.shape import Shaped, shape_rewards
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch

_MOMENTS = ("reward_count", "reward_mean", "reward_squares")
# How a trajectory ends that its budget cut: of one turn's tokens, of the whole context, or of time.
_TRUNCATED = ("length", "context", "time")


def shaped_rewards(batch: Batch, settings: Settings, memory: MutableMapping[str, float]) -> Shaped:
    """Return the step's shaped rewards, the same on every rank. memory: holds what earlier rewards were like."""
    facts = batch.facts
    count, mean, squares = (memory.get(name, 0.0) for name in _MOMENTS)
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
        memory.update(zip(_MOMENTS, (moments.count, moments.mean, moments.squares), strict=True))
    return shaped
