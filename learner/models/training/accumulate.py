"""From micro-batches to a gradient: loss and backward pass, one micro-batch at a time, all on the model's device."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from learner.models.micro_batch import MicroBatch
from learner.models.step_result import Sums


class TrainedModule(Protocol):
    """What a step needs of DeepSpeed's engine."""

    device: Any

    def __call__(self, **inputs: Any) -> Any:
        """Return the model's output."""

    def backward(self, loss: Tensor) -> Any:
        """Add the loss's gradient, averaged over the ranks."""


def accumulate(
    module: TrainedModule,
    micro_batches: Sequence[MicroBatch],
    loss_of: Callable[[MicroBatch], tuple[Tensor, Sums]],
    scale: float,
) -> Sums:
    """Return the sums of the micro-batches, "loss" among them, after adding the gradient of their losses times scale.

    loss_of: what a forward pass over a micro-batch of the module's device gives. Micro-batches come from any device;
    one at a time is on the module's.
    """
    device = torch.device(module.device)
    totals: Sums = {}
    for cpu_micro_batch in micro_batches:
        micro_batch = cpu_micro_batch.to(device)
        loss, sums = loss_of(micro_batch)
        # If the loss or an input is NaN or infinite, multiply the loss by NaN: every gradient becomes NaN, the reduced
        # norm too, and every rank refuses the step together. Otherwise the factor is 1. A loss that is not finite can
        # have a finite gradient (a clipped infinity), and the clamped log ratio makes a finite loss of an infinite
        # behaviour logprob. (No .item(): it would wait for the GPU.)
        poisoned = loss * ((loss.detach() + micro_batch.input_sum()) * 0.0 + 1.0)
        module.backward(poisoned * scale)
        add_sums(totals, {"loss": poisoned.detach(), **sums})
    return totals


def add_sums(totals: Sums, sums: Sums) -> None:
    """Add sums to totals in float64; keys that start with "max_" take the larger."""
    for key, value in sums.items():
        new = value.detach().double()
        old = totals.get(key)
        totals[key] = new if old is None else torch.maximum(old, new) if key.startswith("max_") else old + new
