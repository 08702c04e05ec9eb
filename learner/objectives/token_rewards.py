"""What each model token is rewarded with: its trajectory's score stands at the last one.

Shapes: S trajectories and K model tokens of a micro-batch, N trajectories of the step.
"""

import torch
from torch import Tensor

from learner.packing.micro_batch import MicroBatch


def token_rewards(micro_batch: MicroBatch, scores: Tensor) -> Tensor:
    """Return each model token's reward, [K] float64. scores: of every trajectory of the step, [N] float64."""
    counts = torch.tensor(micro_batch.counts)
    rewards = torch.zeros(int(counts.sum()), dtype=torch.float64)
    last = counts.cumsum(0) - 1
    has_tokens = counts > 0
    numbers = torch.tensor(micro_batch.numbers)[has_tokens]
    rewards[last[has_tokens]] = scores[numbers]
    return rewards


def trajectory_sums(micro_batch: MicroBatch, of_tokens: Tensor, num_trajectories: int) -> Tensor:
    """Return the sum of each trajectory's tokens, 0 for those of other micro-batches. of_tokens: [K]. Returns [N]."""
    sums = torch.zeros(num_trajectories, dtype=torch.float64)
    for number, part in zip(micro_batch.numbers, torch.split(of_tokens, list(micro_batch.counts)), strict=True):
        if number >= 0:
            sums[number] += part.sum()
    return sums
