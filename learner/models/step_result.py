"""What goes into and comes out of one optimizer step of a model."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from learner.packing.micro_batch import MicroBatch

# Sums over a micro-batch's tokens, for metrics; keys that start with "max_" are reduced by maximum.
Sums = dict[str, float]


LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Sums]]


@dataclass(frozen=True)
class StepResult:
    """applied: False when a loss or gradient was not finite; weights and optimizer are then as before the step."""

    applied: bool
    loss: float
    grad_norm: float
    sums: Sums
