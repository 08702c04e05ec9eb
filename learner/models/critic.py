"""The critic: a language model's body with one value for each token.

Shapes: T tokens and K model tokens of a micro-batch, H hidden size.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from learner.models.gradient import StepResult, Sums, accumulate
from learner.models.micro_batch import MicroBatch
from learner.models.model_loading import build_model, has_weights, prepare_for_training
from learner.models.settings import PolicySettings
from learner.models.training.trained_model import TrainedModel
from learner.models.varlen_attention import Segments
from protocol.errors import OperatorError

# (values [K], micro-batch) -> (sum of token losses, sums), all on one device.
ValueLoss = Callable[[Tensor, MicroBatch], tuple[Tensor, Sums]]

# Name of the head in a reward model's folder, as in transformers' classes for sequence classification.
_HEAD = "score.weight"


class ValueModel(torch.nn.Module):
    """A body and a linear head. Its parameters are named as in a folder of transformers' sequence classification."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.config = body.config
        self._body_name = body.base_model_prefix or "model"
        setattr(self, self._body_name, body)
        hidden_size = int(body.get_input_embeddings().embedding_dim)
        self.score = torch.nn.Linear(hidden_size, 1, bias=False, dtype=body.dtype)
        # A fresh head returns 0 for every token, and nothing random.
        torch.nn.init.zeros_(self.score.weight)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the value of the state before each model token, [K] float32."""
        hidden = getattr(self, self._body_name)(
            input_ids=micro_batch.tokens,
            position_ids=micro_batch.position_ids,
            segments=Segments(micro_batch.lengths, micro_batch.tokens.device),
            use_cache=False,
        ).last_hidden_state[0]
        values: Tensor = self.score(hidden[micro_batch.predict_at]).float().squeeze(-1)
        return values


class CriticEngine(TrainedModel):
    """The trained critic. Call `learner.models.world.join_world` first."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(load_value_model, settings, "critic")
        self.vocab_size = int(self._model.config.vocab_size)

    def step(self, micro_batches: Sequence[MicroBatch], loss: ValueLoss, global_weight: float) -> StepResult:
        """Return the outcome of one optimizer step with the gradient of sum(losses over all ranks) / global_weight.

        Every rank passes the same number of micro-batches.
        """

        def loss_of(micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
            return loss(self._engine(micro_batch), micro_batch)

        sums = accumulate(self._engine, micro_batches, loss_of, self._world_size / global_weight)
        return self.update(sums, global_weight)

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return the value of the state before each model token, [K] float32. Collective in ZeRO 3."""
        found: Tensor = self._engine(micro_batch.to(self.device))
        return found


def load_value_model(settings: PolicySettings) -> ValueModel:
    """Return the body of settings.model_dir with its head of one value, or with a fresh head.

    Raises: OperatorError for a head of several values.
    """
    from transformers import AutoModel

    body = build_model(AutoModel, settings)
    model = ValueModel(prepare_for_training(body, gradient_checkpointing=settings.gradient_checkpointing))
    head = _find_head(settings.model_dir) if has_weights() else None
    if head is not None:
        if head.shape != model.score.weight.shape:
            raise OperatorError(
                f"The critic cannot begin as {settings.model_dir}: its head {_HEAD} has the shape {tuple(head.shape)}, "
                f"expected {tuple(model.score.weight.shape)}, one number for each token. Set critic.model to a reward "
                "model of one number, or to nothing for the policy's body."
            )
        with torch.no_grad():
            model.score.weight.copy_(head)
    return model.train()


def _find_head(folder: Path) -> Tensor | None:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if _HEAD in file.keys():  # noqa: SIM118  (not a mapping)
                head: Tensor = file.get_tensor(_HEAD)
                return head
    return None
