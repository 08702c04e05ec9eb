"""The gradient of micro-batches, one at a time.

Shapes: K model tokens of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any, Protocol

import torch
from torch import Tensor

from learner.models.micro_batch import MicroBatch
from learner.models.scoring.scored_model import Scoring

Sums = dict[str, Tensor]
"""Sums over tokens for metrics, one number each, on the device. Keys that start with "max_" are reduced by maximum."""

LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Sums]]
"""(logprobs [K], entropies [K], micro-batch) -> (sum of token losses, sums), all on one device."""

ROUTER_AUX_LOSS = "router_aux_loss"
"""Key of the sum over trajectories of the router's loss, each times its model tokens."""

COMPUTED_TOKENS = "computed_tokens"
"""Key of the sum of the tokens of forward and backward passes: a prompt that trajectories share counts once."""

RouterLoss = Callable[[Sequence[Tensor]], Tensor]
"""(logits of each layer's router for some tokens) -> loss that balances the experts over these tokens."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step, the same on every rank."""

    applied: bool  # False: a loss or gradient was not finite, and nothing changed
    loss: float  # over all ranks, divided by the step's weight
    grad_norm: float  # before clipping
    sums: dict[str, float]  # over all ranks
    lr: float = nan  # learning rate of the step


class TrainedModule(Protocol):
    """The part of DeepSpeed's engine that a step needs."""

    device: Any

    def __call__(self, **inputs: Any) -> Any:
        """Return the model's output."""

    def backward(self, loss: Tensor) -> Any:
        """Add the loss's gradient, averaged over the ranks."""


def score_tokens(
    module: TrainedModule, micro_batch: MicroBatch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return (logprobs [K], entropies [K]), float32, of a model from `make_scored`.

    The micro-batch is on the module's device. Raises: ValueError for a model that returns logits for other tokens.
    """
    scores = _forward(module, micro_batch, temperature, with_entropy=with_entropy).logits[0]
    return scores[:, 0], scores[:, 1].detach()


def token_logits(module: TrainedModule, micro_batch: MicroBatch) -> Tensor:
    """Return the logits before each model token, [K, V] in the model's type. The micro-batch is on the device."""
    logits: Tensor = _forward(module, micro_batch).logits[0]
    return logits


def add_gradient(
    module: TrainedModule,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    scale: float,
    *,
    temperature: float,
    with_entropy: bool,
    router_loss: RouterLoss | None = None,
    router_weight: float = 0.0,
) -> Sums:
    """Return the sums of the micro-batches, "loss" among them, after adding the gradient of their losses times scale.

    router_loss: of each trajectory, weighed by its model tokens; not linear in tokens, so a micro-batch's would depend
    on packing. router_weight: of a model token. It is part of "loss", and unweighted in its own sum.
    """

    def loss_of(micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        output = _forward(module, micro_batch, temperature, with_entropy=with_entropy)
        scores = output.logits[0]
        loss, sums = loss_function(scores[:, 0], scores[:, 1].detach(), micro_batch)
        # A loss that masks the tokens that are not finite (`torch.where`, `clamp`) passes no NaN on to the model.
        scores.register_hook(partial(torch.mul, _one_if_finite(loss, micro_batch)))
        if router_loss is None:
            return loss, sums
        balance = _balance(router_loss, output.router_logits, micro_batch)
        return loss + router_weight * balance, {**sums, ROUTER_AUX_LOSS: balance.detach()}

    return accumulate(module, micro_batches, loss_of, scale)


def _balance(router_loss: RouterLoss, layers: Sequence[Tensor], micro_batch: MicroBatch) -> Tensor:
    parts = zip(*(micro_batch.split(layer.flatten(0, -2)) for layer in layers), strict=True)
    losses = [router_loss(part) * count for part, count in zip(parts, micro_batch.counts, strict=True)]
    return torch.stack(losses).sum()


def accumulate(
    module: TrainedModule,
    micro_batches: Sequence[MicroBatch],
    loss_of: Callable[[MicroBatch], tuple[Tensor, Sums]],
    scale: float,
) -> Sums:
    """Return the sums of the micro-batches after adding the gradient of their losses times scale.

    "loss" and COMPUTED_TOKENS are among them.
    loss_of: returns the loss and sums of a micro-batch on the module's device.
    """
    device = torch.device(module.device)
    totals: Sums = {}
    for cpu_micro_batch in micro_batches:
        micro_batch = cpu_micro_batch.to(device)
        loss, sums = loss_of(micro_batch)
        poisoned = loss * _one_if_finite(loss, micro_batch)
        module.backward(poisoned * scale)
        num_computed = torch.full((), float(cpu_micro_batch.tokens.numel()), device=device)
        add_sums(totals, {"loss": poisoned.detach(), COMPUTED_TOKENS: num_computed, **sums})
    return totals


def _one_if_finite(loss: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return 1, or NaN if the loss or an input is not finite: its product with a loss has all ranks refuse the step.

    Such a loss can have a finite gradient (a clipped infinity), and the clamped log ratio hides an infinite behaviour
    logprob. (No .item(): it would wait for the GPU.)
    """
    return (loss.detach() + micro_batch.input_sum()) * 0.0 + 1.0


def add_sums(totals: Sums, sums: Sums) -> None:
    """Add sums to totals in float64; keys that start with "max_" take the larger."""
    for key, value in sums.items():
        new = value.detach().double()
        old = totals.get(key)
        totals[key] = new if old is None else torch.maximum(old, new) if key.startswith("max_") else old + new


def _forward(
    module: TrainedModule, micro_batch: MicroBatch, temperature: float | None = None, *, with_entropy: bool = False
) -> Any:
    """Return the model's output. temperature: None: with logits in place of logprobs."""
    return module(
        input_ids=micro_batch.tokens,
        position_ids=micro_batch.position_ids,
        logits_to_keep=micro_batch.predict_at,
        segments=micro_batch.segments,
        scoring=None if temperature is None else Scoring(micro_batch.targets, temperature, with_entropy),
        use_cache=False,
    )
