"""From micro-batches to a gradient: forward, loss, backward, one micro-batch at a time, all on the model's device.

Shapes: K model tokens of a micro-batch.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from learner.models.logprobs import token_logprobs
from learner.models.step_result import LossFunction, Sums
from learner.models.varlen_attention import Segments
from learner.packing.micro_batch import MicroBatch


class TrainedModule(Protocol):
    """What a step needs of DeepSpeed's engine."""

    device: Any

    def __call__(self, **inputs: Any) -> Any:
        """Return the model's output."""

    def backward(self, loss: Tensor) -> Any:
        """Add the loss's gradient, averaged over the ranks."""


def score_tokens(
    module: TrainedModule, micro_batch: MicroBatch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return (logprobs [K], entropies [K]), float32; logits exist only where a model token is predicted.

    The micro-batch is on the module's device. Raises: ValueError for a model that gives logits for other tokens.
    """
    logits = module(
        input_ids=micro_batch.tokens,
        position_ids=micro_batch.position_ids,
        logits_to_keep=micro_batch.predict_at,
        segments=Segments(micro_batch.lengths, micro_batch.tokens.device),
        use_cache=False,
    ).logits[0]
    if len(logits) != micro_batch.num_model_tokens:
        # Taken in order, they would be other tokens' logprobs wherever a prompt stands before them.
        asked = micro_batch.num_model_tokens
        raise ValueError(f"the model gives logits for {len(logits)} tokens where logits_to_keep names {asked}")
    return token_logprobs(logits, micro_batch.targets, temperature, with_entropy=with_entropy)


def add_gradient(
    module: TrainedModule,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    scale: float,
    *,
    temperature: float,
    with_entropy: bool,
) -> Sums:
    """Return the sums of the micro-batches, "loss" among them, after adding the gradient of their losses times scale.

    Micro-batches come from any device; one at a time is on the module's.
    """
    device = torch.device(module.device)
    totals: Sums = {}
    for cpu_micro_batch in micro_batches:
        micro_batch = cpu_micro_batch.to(device)
        logprobs, entropies = score_tokens(module, micro_batch, temperature, with_entropy=with_entropy)
        loss, sums = loss_function(logprobs, entropies, micro_batch)
        # If the loss or an input is NaN or infinite, multiply the loss by NaN: every gradient becomes NaN, the reduced
        # norm too, and every rank refuses the step together. Otherwise the factor is 1. A loss that is not finite can
        # have a finite gradient (a clipped infinity), and the clamped log ratio makes a finite loss of an infinite
        # behaviour logprob. (No .item(): it would wait for the GPU.)
        poisoned = loss * ((loss.detach() + _input_sum(micro_batch)) * 0.0 + 1.0)
        module.backward(poisoned * scale)
        _add(totals, {"loss": poisoned.detach(), **sums})
    return totals


def _input_sum(micro_batch: MicroBatch) -> Tensor:
    """Return a number that is not finite when one that goes into the loss is not."""
    return micro_batch.behaviour_logprobs.sum() + micro_batch.advantages.sum() + micro_batch.weights.sum()


def _add(totals: Sums, sums: Sums) -> None:
    for key, value in sums.items():
        new = value.detach().double()
        old = totals.get(key)
        totals[key] = new if old is None else torch.maximum(old, new) if key.startswith("max_") else old + new
