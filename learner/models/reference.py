"""The reference of the KL term: a model that is never trained, or the policy with its adapters off.

In ZeRO 3 the ranks share the model, otherwise every rank holds it whole, in the policy's type. Its state in a
checkpoint is a Hugging Face model folder.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.models.micro_batch import MicroBatch
from learner.models.policy import LanguageModel, PolicyEngine
from learner.models.read_back import WrittenFiles
from learner.models.settings import PolicySettings
from learner.models.weights.export import export_model
from protocol.errors import OperatorError

# Keys of a config.json that do not change what its model computes; also all that end with token_id.
_NOT_COMPUTED = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def check_refresh(folder: Path, policy: Path, *, trust_remote_code: bool) -> None:
    """Raise OperatorError when a copy of the policy's weights into the model of `folder` would be another model."""
    from transformers import AutoConfig

    own, others = (
        _form_of(AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).to_dict())
        for model in (folder, policy)
    )
    if keys := sorted(key for key in own.keys() | others.keys() if own.get(key) != others.get(key)):
        raise OperatorError(
            f"settings: reference.refresh_every_steps copies the policy into reference.model = {folder}, and its "
            f"config.json has another {', '.join(keys)} than the policy's: the copy would be another model. Leave "
            "reference.model empty, or set reference.refresh_every_steps to 0."
        )


def _form_of(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _form_of(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (key in _NOT_COMPUTED or str(key).endswith("token_id"))
    }


class ReferenceModel(LanguageModel):
    """A model of its own, which scores tokens inside `in_use`.

    is_kept: checkpoints hold its weights, since no setting names a folder with them.
    """

    def __init__(self, settings: PolicySettings, *, is_offloaded: bool, is_kept: bool) -> None:
        """is_offloaded: outside `in_use` it is in host memory, unless the ranks share it."""
        self.is_kept = is_kept
        # No adapters: `refresh` copies the policy's merged weights.
        plain = replace(settings, is_trained=False, lora=None, router_aux_loss=0.0, deepspeed={})
        self._plain = replace(plain, gradient_checkpointing=False)
        self._is_offloaded = is_offloaded
        self._load(settings.model_dir)

    def _load(self, folder: Path) -> None:
        super().__init__(replace(self._plain, model_dir=folder), "reference")
        self._is_offloaded = self._is_offloaded and self._zero_stage != 3
        if self._is_offloaded:
            self._model.to("cpu")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep it on this rank's device within the block."""
        if self._is_offloaded:
            self._model.to(self.device)
        yield
        if self._is_offloaded:
            self._model.to("cpu")

    @torch.no_grad()
    def refresh(self, policy: PolicyEngine) -> None:
        """Copy the policy's weights. Collective in ZeRO 3."""
        own = dict(self._model.named_parameters(remove_duplicate=False))
        own |= dict(self._model.named_buffers(remove_duplicate=False))
        for weight in policy.merged_weights():
            # Ranks never share buffers.
            whole = nullcontext() if weight.is_buffer else self.gather([own[weight.name]], writer=0)
            with policy.gather(weight.parts), whole:
                own[weight.name].copy_(weight.merge())

    def save_state(self, folder: Path, shard_bytes: int = 0) -> WrittenFiles:
        """Write it as a model folder from rank 0; returns the files there. Collective in ZeRO 3.

        Raises: OSError or SafetensorError when the disk refuses.
        """
        return export_model(folder, self._plain.model_dir, self._model, self.gather, self._shards.whole_numel)

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        """Load the files of `save_state`. Collective."""
        method = self.scored.method
        del self._engine, self._model, self._shards, self.scored  # not two models at a time
        self._load(folder)
        self.scored.use(method)


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
