"""How much better each model token was than expected: by the rewards of its group, or by those of its own trajectory.

Shapes: N trajectories of the step, S trajectories and K model tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.advantages.advantage import OfGroups, OfTokens
from learner.algorithms.whiten import Reduce, whiten
from learner.packing.micro_batch import MicroBatch
from protocol.wire.messages import Batch


@dataclass(frozen=True)
class Discount:
    """How far a reward reaches back over model tokens."""

    gamma: float  # what a later token's reward counts less for each token between
    lam: float  # GAE's lambda: 1 believes the rewards, 0 the critic


def of_groups(micro_batches: Sequence[MicroBatch], rewards: Tensor, batch: Batch, estimate: OfGroups) -> list[Tensor]:
    """Return the advantages of each micro-batch's tokens, [K] float64: a token has its trajectory's.

    rewards: of every trajectory of the step, [N] float64, on every rank: a group may lie on several.
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
    micro_batches: Sequence[MicroBatch], rewards: Sequence[Tensor], estimate: OfTokens, discount: Discount
) -> list[Tensor]:
    """Return the advantages of each micro-batch's tokens, [K] float64. rewards: of its tokens, [K] float64."""
    found = []
    for each, of_each in zip(micro_batches, rewards, strict=True):
        counts = list(each.counts)
        values: Sequence[Tensor | None] = (
            [None] * len(counts) if each.values is None else torch.split(each.values.double(), counts)
        )
        parts = [
            estimate(part, value, discount.gamma, discount.lam)
            for part, value in zip(torch.split(of_each, counts), values, strict=True)
            if len(part)
        ]
        found.append(torch.cat([of_each.new_zeros(0), *parts]))
    return found


def whitened(advantages: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
    """Return the advantages with mean 0 and deviation 1 over all tokens of the step, those of other ranks too."""
    together = torch.cat([torch.zeros(0, dtype=torch.float64), *advantages])
    return list(torch.split(whiten(together, reduce), [len(part) for part in advantages]))
