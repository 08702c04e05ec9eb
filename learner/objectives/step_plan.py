"""A step's batch on one rank: micro-batches and their optimizer updates.

Shapes: N trajectories of an update over all ranks, S trajectories and K model tokens of a micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

# (model tokens of every trajectory of one update [N] float64) -> weights [N] float64: the update's loss is the sum over
# trajectories of weight times sum of token losses.
Aggregate = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Update:
    """The size of one optimizer update."""

    num_micro_batches: int  # micro-batches of this rank; the same number on every rank
    num_model_tokens: int  # tokens in the loss, of all ranks


@dataclass(frozen=True)
class StepPlan:
    """One pass over a step's samples."""

    micro_batches: tuple[MicroBatch, ...]  # micro-batches of this rank, in the order of the updates
    updates: tuple[Update, ...]  # in order

    def parts(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Update, Sequence[MicroBatch]]]:
        """Yield each update with its part of the micro-batches, which are the plan's with added columns."""
        start = 0
        for update in self.updates:
            yield update, micro_batches[start : start + update.num_micro_batches]
            start += update.num_micro_batches


def plan_updates(
    batch: Batch,
    trajectories: Mapping[int, Trajectory],
    policy_version: int,
    aggregate: Aggregate,
    is_trained: Sequence[bool],
) -> StepPlan:
    """Return the step's micro-batches on this rank, with the weight of each token in its update.

    trajectories: this rank's, by index into batch.facts. policy_version: of the learner before the step.
    is_trained: of every trajectory of the step; False: its tokens have weight 0. A weight is the aggregate's times the
    update's number of model tokens, by which the update divides its loss. So a mean over tokens has weight exactly 1.
    """
    micro_batches: list[MicroBatch] = []
    updates = []
    for planned, parts in _mini_batches(batch):
        tokens = [batch.facts[index].num_model_tokens * is_trained[index] for index in planned]
        counts, total = torch.tensor(tokens, dtype=torch.float64), sum(tokens)
        weights = dict(zip(planned, (aggregate(counts) * total).tolist(), strict=True))
        for part in parts:
            made = make_micro_batch([_sample(trajectories[index], index) for index in part])
            staleness = tuple(policy_version - batch.facts[n].oldest_version if n >= 0 else 0 for n in made.numbers)
            by_trajectory = torch.tensor([weights.get(n, 0.0) for n in made.numbers], dtype=torch.float64)
            of_tokens = by_trajectory.repeat_interleave(torch.tensor(made.counts)).float()
            micro_batches.append(replace(made, weights=of_tokens, staleness=staleness))
        updates.append(Update(len(parts), max(1, total)))
    return StepPlan(tuple(micro_batches), tuple(updates))


def _mini_batches(batch: Batch) -> list[tuple[list[int], list[list[int]]]]:
    """Return (indices of all ranks, this rank's micro-batches) of each update."""
    if not batch.mini_batches:
        return [(batch.planned, batch.micro_batches)]
    found, planned, part = [], 0, 0
    for each in batch.mini_batches:
        next_planned, next_part = planned + each.num_planned, part + each.num_micro_batches
        found.append((batch.planned[planned:next_planned], batch.micro_batches[part:next_part]))
        planned, part = next_planned, next_part
    return found


def _sample(trajectory: Trajectory, index: int) -> LearnerSample:
    return LearnerSample(
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask.astype(bool),
        behaviour_logprobs=trajectory.behaviour_logprobs,
        number=index,
    )
