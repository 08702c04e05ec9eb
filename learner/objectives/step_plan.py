"""A step's batch on one rank: its micro-batches, divided among the optimizer updates of the step.

An update trains one mini-batch. Every rank has the same number of micro-batches in it.
Shapes: N trajectories of an update over all ranks, S trajectories and K model tokens of a micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

# Takes the number of model tokens of each trajectory of an update, [N] float64. Returns the weights, [N] float64.
# The update's loss is the sum over trajectories of (weight * sum of token losses).
Aggregate = Callable[[Tensor], Tensor]
# Takes the same. Returns the number that divides the loss; None: its model tokens.
Divisor = Callable[[Tensor], float] | None


@dataclass(frozen=True)
class Update:
    """The size of one optimizer update."""

    num_micro_batches: int  # micro-batches of this rank; the same number on every rank
    num_model_tokens: int  # tokens in the loss, of all ranks
    weight: float  # number that divides the loss, 0 for an update that trains no token

    @property
    def divisor(self) -> float:
        """The number that divides the loss, or 1 for an update that trains none."""
        return self.weight or 1


@dataclass(frozen=True)
class StepPlan:
    """One pass over a step's samples."""

    micro_batches: tuple[MicroBatch, ...]  # micro-batches of this rank, in the order of the updates
    updates: tuple[Update, ...]

    def split(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Update, Sequence[MicroBatch]]]:
        """Yield each update with its micro-batches. micro_batches: the plan's, which may have more columns by now."""
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
    divisor: Divisor = None,
    *,
    share_prompts: bool,
) -> StepPlan:
    """Return the step's micro-batches on this rank, with the weight of each token in its update.

    trajectories: this rank's, by index into batch.facts. policy_version: the learner's before the step.
    is_trained: one value per trajectory of the step; False: its tokens have weight 0.
    share_prompts: equal prompts of a micro-batch are computed once.
    A token's weight is the aggregate's weight times the divisor, because the update divides its loss by that number.
    """
    micro_batches: list[MicroBatch] = []
    updates = []
    for indices, index_lists in _mini_batches(batch):
        tokens = [batch.facts[index].num_model_tokens * is_trained[index] for index in indices]
        counts, num_model_tokens = torch.tensor(tokens, dtype=torch.float64), sum(tokens)
        weight = num_model_tokens if divisor is None else divisor(counts)
        weights = dict(zip(indices, (aggregate(counts) * weight).tolist(), strict=True))
        for own_indices in index_lists:
            samples = [_sample(trajectories[index], index) for index in own_indices]
            packed = make_micro_batch(samples, share_prompts=share_prompts)
            micro_batches.append(_with_weights(packed, weights, batch, policy_version))
        updates.append(Update(len(index_lists), num_model_tokens, weight))
    return StepPlan(tuple(micro_batches), tuple(updates))


def _with_weights(
    micro_batch: MicroBatch, weights: Mapping[int, float], batch: Batch, policy_version: int
) -> MicroBatch:
    """Return the micro-batch with the weight of each token and the staleness of each trajectory.

    A rank without work has a micro-batch whose only number is -1: it has no tokens to train.
    """
    numbers = micro_batch.numbers
    staleness = tuple(policy_version - batch.facts[n].oldest_version if n >= 0 else 0 for n in numbers)
    by_trajectory = torch.tensor([weights.get(n, 0.0) for n in numbers], dtype=torch.float64)  # [S]
    by_token = by_trajectory.repeat_interleave(torch.tensor(micro_batch.counts)).float()  # [K]
    return replace(micro_batch, weights=by_token, staleness=staleness)


def _mini_batches(batch: Batch) -> list[tuple[list[int], list[list[int]]]]:
    """Return for each update the trajectories of all ranks, and those of each micro-batch of this rank, as indices."""
    if not batch.mini_batches:
        return [(batch.planned, batch.micro_batches)]
    mini_batches, start, first = [], 0, 0
    for size in batch.mini_batches:
        end, last = start + size.num_planned, first + size.num_micro_batches
        mini_batches.append((batch.planned[start:end], batch.micro_batches[first:last]))
        start, first = end, last
    return mini_batches


def _sample(trajectory: Trajectory, index: int) -> LearnerSample:
    return LearnerSample(
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask.astype(bool),
        behaviour_logprobs=trajectory.behaviour_logprobs,
        advantage=trajectory.facts.reward,  # until an objective replaces it
        number=index,
    )
