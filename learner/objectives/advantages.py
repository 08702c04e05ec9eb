"""Advantages of model tokens: from the rewards of the group, or along the trajectory's own tokens.

Shapes: N trajectories of the step, S trajectories and K model tokens of a micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithms.advantages.advantage import OfGroups, OfTokens
from learner.algorithms.whiten import Reduce, whiten
from learner.models.micro_batch import MicroBatch
from protocol.wire.messages import Batch


def of_groups(micro_batches: Sequence[MicroBatch], rewards: Tensor, batch: Batch, estimate: OfGroups) -> list[Tensor]:
    """Return the advantages of each micro-batch's tokens, [K] float64. All tokens of a trajectory have the same.

    rewards: [N] float64, of the whole step, because a group may lie on several ranks.
    """
    of_trajectories = torch.zeros(len(batch.facts), dtype=torch.float64)
    for group in batch.groups:
        lengths = torch.tensor([[batch.facts[index].num_model_tokens for index in group]], dtype=torch.float64)
        of_trajectories[group] = estimate(rewards[group][None], lengths)[0]
    found = []
    for each in micro_batches:
        numbers, counts = torch.tensor(each.numbers), torch.tensor(each.counts)
        has_tokens = counts > 0
        found.append(of_trajectories[numbers[has_tokens]].repeat_interleave(counts[has_tokens]))
    return found


def of_tokens(
    micro_batches: Sequence[MicroBatch], rewards: Sequence[Tensor], estimate: OfTokens, gamma: float, lam: float
) -> list[Tensor]:
    """Return the advantages of each micro-batch's tokens, [K] float64. rewards: per micro-batch, [K] float64."""
    found = []
    for each, of_each in zip(micro_batches, rewards, strict=True):
        counts = list(each.counts)
        values: Sequence[Tensor | None] = (
            [None] * len(counts) if each.values is None else torch.split(each.values.double(), counts)
        )
        parts = [
            estimate(part, value, gamma, lam)
            for part, value in zip(torch.split(of_each, counts), values, strict=True)
            if len(part)
        ]
        found.append(torch.cat([of_each.new_zeros(0), *parts]))
    return found


def whiten_step(micro_batches: Sequence[MicroBatch], advantages: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
    """Return the advantages with mean 0 and deviation 1 over all tokens of the step's loss, on all ranks."""
    nothing = torch.zeros(0, dtype=torch.float64)
    is_trained = torch.cat([nothing, *[(each.weights > 0.0).double() for each in micro_batches]])
    together = whiten(torch.cat([nothing, *advantages]), reduce, is_trained)
    return list(torch.split(together, [len(part) for part in advantages]))
