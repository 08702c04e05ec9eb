"""The reference of the KL term: a model that is never trained, or the policy with its adapters off.

Every rank holds the whole model, in the policy's type. Its state in a checkpoint is a Hugging Face model folder.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.models.gradient import score_tokens
from learner.models.micro_batch import MicroBatch
from learner.models.model_loading import load_model
from learner.models.policy import PolicyEngine
from learner.models.read_back import WrittenFiles
from learner.models.scoring.scored_model import scored_model
from learner.models.settings import PolicySettings
from learner.models.weights.export import export_model
from learner.models.world import own_device, share


class ReferenceModel:
    """A model of its own. `is_kept`: checkpoints hold its weights, since no setting names a folder with them."""

    def __init__(self, settings: PolicySettings, *, is_offloaded: bool, is_kept: bool) -> None:
        """is_offloaded: it is in host memory outside `in_use`."""
        self.is_kept = is_kept
        # No adapters: `refresh` copies the policy's merged weights.
        self._settings = replace(settings, gradient_checkpointing=False, lora=None, router_aux_loss=0.0)
        self._is_offloaded = is_offloaded
        self.device = own_device()
        self._model = _load_shared(self._settings).requires_grad_(False)
        self.scored = scored_model(self._model)
        self.vocab_size = int(self._model.config.vocab_size)
        self._model.to("cpu" if is_offloaded else self.device)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep it on this rank's device within the block."""
        self._model.to(self.device)
        yield
        if self._is_offloaded:
            self._model.to("cpu")

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Return the model tokens' logprobs, float32 [K], at the sampling temperature. Inside `in_use`."""
        return score_tokens(self, micro_batch.to(self.device), self._settings.temperature, with_entropy=False)[0]

    @torch.no_grad()
    def refresh(self, policy: PolicyEngine) -> None:
        """Copy the policy's weights. Collective in ZeRO 3."""
        own = self._model.state_dict()
        for weight in policy.merged_weights():
            with policy.gather(weight.parts):
                own[weight.name].copy_(weight.merge())

    def save_state(self, folder: Path) -> WrittenFiles:
        """Write it as a model folder from rank 0; returns the files there.

        Raises: OSError or SafetensorError when the disk refuses.
        """
        return export_model(folder, self._settings.model_dir, self._model, lambda tensors: nullcontext(), Tensor.numel)

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        """Load the files of `save_state`. Collective."""
        found = _load_shared(replace(self._settings, model_dir=folder))
        self._model.load_state_dict(found.state_dict())

    def __call__(self, **inputs: object) -> object:
        """Return the model's output."""
        return self._model(**inputs)

    def backward(self, loss: Tensor) -> None:
        raise RuntimeError("the reference model is never trained")


def _load_shared(settings: PolicySettings) -> Any:
    """Return the model with rank 0's weights on every rank. Collective."""
    model = load_model(settings)
    if dist.is_initialized():
        share(model.parameters())
    return model


class BaseReference:
    """The policy without its LoRA adapters. Checkpoints hold nothing of it: the base is the run's model folder."""

    def __init__(self, policy: PolicyEngine) -> None:
        self._policy = policy

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context in which the policy is its base."""
        return self._policy.without_adapters()

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Return the model tokens' logprobs, float32 [K], at the sampling temperature. Inside `in_use`.

        Collective in ZeRO 3.
        """
        return self._policy.logprobs(micro_batch)
