"""The critic: a language model's body with one value for each token.

Shapes: T tokens and K model tokens of a micro-batch, H hidden size.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from learner.models.gradient import StepResult, Sums, accumulate
from learner.models.micro_batch import MicroBatch
from learner.models.model_loading import build_model, has_weights, prepare_for_training, unused_tensors
from learner.models.read_back import WrittenFiles
from learner.models.settings import PolicySettings
from learner.models.training.state import SHARD_BYTES
from learner.models.training.trained_model import TrainedModel
from learner.models.world import share
from protocol.errors import OperatorError
from protocol.value_heads import find_head, read_scale

_BIAS = "bias.json"

# (values [K], micro-batch) -> (sum of token losses, sums), all on one device.
ValueLoss = Callable[[Tensor, MicroBatch], tuple[Tensor, Sums]]


class ValueModel(torch.nn.Module):
    """A body and a linear head. Its parameters are named as in a folder of transformers' sequence classification."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.config = body.config
        # transformers reads this attribute where it writes the stacked experts of a mixture one by one.
        self.base_model_prefix = body.base_model_prefix or "model"
        setattr(self, self.base_model_prefix, body)
        hidden_size = int(body.get_input_embeddings().embedding_dim)
        self.score = torch.nn.Linear(hidden_size, 1, bias=False, dtype=body.dtype)
        # A fresh head returns 0 for every token, and nothing random.
        torch.nn.init.zeros_(self.score.weight)
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(1), persistent=False)  # of a reward model's head; not trained

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the value of the state before each model token, [K] float32."""
        hidden = getattr(self, self.base_model_prefix)(
            input_ids=micro_batch.tokens,
            position_ids=micro_batch.position_ids,
            segments=micro_batch.segments,
            use_cache=False,
        ).last_hidden_state[0]
        values: Tensor = self.score(hidden[micro_batch.predict_at]).float().squeeze(-1)
        return values + self.bias


class CriticEngine(TrainedModel):
    """The trained critic. Call `learner.models.world.join_world` first."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(load_value_model, settings, "critic")

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

    def save_state(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> WrittenFiles:
        """Write also the head's bias, which belongs to the saved head; otherwise as `TrainedModel.save_state`."""
        written = super().save_state(folder, shard_bytes)
        if dist.get_rank() == 0:
            (folder / _BIAS).write_text(json.dumps(self._model.bias.item()), encoding="utf-8")
        return written

    def load_state(self, folder: Path) -> None:
        """Load also the head's bias, whatever critic.model is now; otherwise as `TrainedModel.load_state`."""
        super().load_state(folder)
        if (folder / _BIAS).is_file():
            self._model.bias.fill_(json.loads((folder / _BIAS).read_bytes()))
        elif self._model.bias.any():
            raise OperatorError(
                f"The state in {folder} is of an earlier version, which did not save the bias of the critic's head. "
                "Start a new run from the model folder of that checkpoint."
            )


def load_value_model(settings: PolicySettings) -> ValueModel:
    """Return the body of settings.model_dir with its head of one value, or with a fresh head.

    Raises: OperatorError for tensors that neither the body nor such a head uses.
    """
    from transformers import AutoModel

    body = build_model(AutoModel, settings)
    model = ValueModel(prepare_for_training(body, gradient_checkpointing=settings.gradient_checkpointing))
    if has_weights():
        has_head = _load_head(model, settings.model_dir, unused_tensors(body))
        if has_head and settings.role == "critic":
            _normalise(model)
    if dist.is_initialized():
        share([model.bias])
    return model.train()


@torch.no_grad()
def _load_head(model: ValueModel, folder: Path, unused: Collection[str]) -> bool:
    """Load the folder's head; False: it has none. unused: names of its tensors that the body does not use."""
    tensors = dict(_read_tensors(folder, unused))
    try:
        head = find_head({name: tensor.shape for name, tensor in tensors.items()}, model.score.in_features)
    except ValueError as error:
        raise OperatorError(
            f"The critic cannot begin as {folder}: {error}. Set critic.model to a reward model of one number, or to "
            "nothing for the policy's body."
        ) from None
    if head is None:
        return False
    model.score.weight.copy_(tensors[f"{head}.weight"])
    if (bias := tensors.get(f"{head}.bias")) is not None:
        model.bias.copy_(bias)
    return True


@torch.no_grad()
def _normalise(model: ValueModel) -> None:
    """Give values the unit of the rewards that a served reward model returns: less `mean`, over `std` of its config."""
    mean, std = read_scale(model.config)
    model.score.weight.div_(std)
    model.bias.sub_(mean).div_(std)


def _read_tensors(folder: Path, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield these tensors of a folder's safetensors or pytorch_model files."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys() if name in names)  # noqa: SIM118
    if not any(folder.glob("*.safetensors")):
        for path in sorted(folder.glob("pytorch_model*.bin")):
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            yield from ((name, tensor) for name, tensor in tensors.items() if name in names)
