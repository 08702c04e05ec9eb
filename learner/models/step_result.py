"""What goes into and comes out of one optimizer step of a model."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from learner.models.micro_batch import MicroBatch

# Sums over a micro-batch's tokens, for metrics: one number each, on the micro-batch's device, so that nothing waits for
# a GPU before the step ends. Keys that start with "max_" are reduced by maximum, over micro-batches and ranks.
Sums = dict[str, Tensor]

# (logprobs [K], entropies [K], micro-batch) -> (sum of token losses, sums), all on one device.
LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Sums]]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    applied: bool  # False when a loss or gradient was not finite: weights and optimizer are then as before the step
    loss: float  # over all ranks, divided by the step's weight
    grad_norm: float  # before clipping
    sums: dict[str, float]  # over all ranks
