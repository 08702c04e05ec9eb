"""A language model's part of a gradient: what it gives each model token of a micro-batch, and its loss from that.

Shapes: K model tokens of a micro-batch.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from learner.models.micro_batch import MicroBatch
from learner.models.scoring.scored_model import Scoring
from learner.models.step_result import LossFunction, Sums
from learner.models.training.accumulate import TrainedModule, accumulate
from learner.models.varlen_attention import Segments

# The sum over micro-batches of the router's loss, each times its model tokens.
ROUTER_AUX_LOSS = "router_aux_loss"


def score_tokens(
    module: TrainedModule, micro_batch: MicroBatch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return (logprobs [K], entropies [K]), float32, of a model that `scored_model.make_scored` prepared.

    The micro-batch is on the module's device. Raises: ValueError for a model that gives logits for other tokens.
    """
    scores = _forward(module, micro_batch, temperature, with_entropy=with_entropy).logits[0]
    return scores[:, 0], scores[:, 1].detach()


def add_gradient(
    module: TrainedModule,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    scale: float,
    *,
    temperature: float,
    with_entropy: bool,
    router_aux_loss: float = 0.0,
) -> Sums:
    """Return the sums of the micro-batches, "loss" among them, after adding the gradient of their losses times scale.

    Micro-batches come from any device; one at a time is on the module's. router_aux_loss: weight of the model's own
    loss that balances its experts, each micro-batch's counting as its model tokens do; it is in "loss", and unweighted
    in the sum of its name.
    """

    def loss_of(micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        output = _forward(module, micro_batch, temperature, with_entropy=with_entropy)
        scores = output.logits[0]
        loss, sums = loss_function(scores[:, 0], scores[:, 1].detach(), micro_batch)
        if not router_aux_loss:
            return loss, sums
        balance = output.aux_loss * micro_batch.num_model_tokens
        return loss + router_aux_loss * balance, {**sums, ROUTER_AUX_LOSS: balance.detach()}

    return accumulate(module, micro_batches, loss_of, scale)


def _forward(module: TrainedModule, micro_batch: MicroBatch, temperature: float, *, with_entropy: bool) -> Any:
    return module(
        input_ids=micro_batch.tokens,
        position_ids=micro_batch.position_ids,
        logits_to_keep=micro_batch.predict_at,
        segments=Segments(micro_batch.lengths, micro_batch.tokens.device),
        scoring=Scoring(micro_batch.targets, temperature, with_entropy),
        use_cache=False,
    )
