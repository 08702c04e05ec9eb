"""The policy under training: a transformers model inside DeepSpeed.

Methods that change or gather weights are collective: every rank calls them in the same order.
Shapes: K model tokens of a micro-batch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from learner.disk.model_folder import NUM_EXPERTS
from learner.models.gradient import LossFunction, StepResult, Sums, accumulate, add_gradient, score_tokens, token_logits
from learner.models.micro_batch import MicroBatch
from learner.models.model_loading import load_model, router_loss_of
from learner.models.read_back import WrittenFiles
from learner.models.scoring.scored_model import scored_model
from learner.models.settings import PolicySettings
from learner.models.training.trained_model import TrainedModel
from learner.models.weights.export import export_model
from learner.models.weights.lora import LoraForm, adapted_layers, adapters_off, write_adapters
from learner.models.weights.pushed import PushedWeights, Weight, weights_of
from learner.models.world import reduce_sums
from protocol.weights.digest import digest_of_all, digest_of_tensor

# Size of the model's part that is whole at a time while the digest is computed.
_DIGESTED_BYTES = 64 << 20


class LanguageModel(TrainedModel):
    """A model that scores tokens, trained or not."""

    def __init__(self, settings: PolicySettings, role: str) -> None:
        """role: name of the model in errors."""
        super().__init__(load_model, settings, role)
        self.scored = scored_model(self._model)

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """Return the model tokens' logprobs, float32 [K], at the sampling temperature or the one given.

        Collective in ZeRO 3.
        """
        temperature = temperature or self._settings.temperature
        return score_tokens(self._engine, micro_batch.to(self.device), temperature, with_entropy=False)[0]

    @torch.no_grad()
    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits before each model token, [K, V]. Collective in ZeRO 3."""
        return token_logits(self._engine, micro_batch.to(self.device))


class PolicyEngine(LanguageModel):
    """The trained policy. Call `learner.models.world.join_world` first."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings, "policy")
        weight = settings.router_aux_loss
        self._router_loss = router_loss_of(self._model, weight) if weight else None

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        global_weight: float,
        *,
        with_entropy: bool = True,
    ) -> StepResult:
        """Return the outcome of one optimizer step with the gradient of sum(losses over all ranks) / global_weight.

        Every rank passes the same number of micro-batches. with_entropy: False: the loss gets zeros for entropies.
        """
        router_weight = 0.0
        if self._router_loss is not None:
            # The router's loss is a mean over all model tokens of the update, also of those that the loss masks.
            own = torch.tensor([sum(each.num_model_tokens for each in micro_batches)], device=self.device)
            (num_tokens,) = reduce_sums(own)
            router_weight = self._settings.router_aux_loss * global_weight / max(1.0, num_tokens)
        # DeepSpeed averages over the ranks; world_size makes it a sum.
        sums = add_gradient(
            self._engine,
            micro_batches,
            loss_function,
            self._world_size / global_weight,
            temperature=self._settings.temperature,
            with_entropy=with_entropy,
            router_loss=self._router_loss,
            router_weight=router_weight,
        )
        return self.update(sums, global_weight)

    def add_part(self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction) -> Sums:
        """Add the gradient of a part of a step, which `update` divides; returns this rank's sums."""
        return add_gradient(
            self._engine,
            micro_batches,
            loss_function,
            float(self._world_size),
            temperature=self._settings.temperature,
            with_entropy=True,
        )

    def step_of_logits(
        self,
        micro_batches: Sequence[MicroBatch],
        teacher: Callable[[MicroBatch], Tensor],
        loss_function: Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Sums]],
        global_weight: float,
    ) -> StepResult:
        """Return the outcome of one optimizer step; the loss is of the policy's and the teacher's logits [K, V].

        teacher: logits of a micro-batch. All logits of a micro-batch exist at once.
        """

        def loss_of(micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
            taught = teacher(micro_batch)
            return loss_function(token_logits(self._engine, micro_batch), taught, micro_batch)

        sums = accumulate(self._engine, micro_batches, loss_of, self._world_size / global_weight)
        return self.update(sums, global_weight)

    def export_hf(self, folder: Path) -> WrittenFiles:
        """Write the policy as a Hugging Face model folder (safetensors, config, tokenizer files) from rank 0.

        Returns the files with weights on rank 0, and nothing on other ranks.
        """
        written = export_model(folder, self._settings.model_dir, self._model, self.gather, self._shards.whole_numel)
        if self._settings.lora is not None:
            written |= self._export_adapters(folder / "adapter", self._settings.lora)
        return written

    def merged_weights(self) -> list[Weight]:
        """Return the weights under the names of a model without adapters; `gather` makes a weight's parts whole."""
        return weights_of(self._model)

    def pushed_weights(self, bucket_bytes: int) -> PushedWeights:
        """Return the plan of this policy's pushes, in buckets of bucket_bytes."""
        dtype = self._settings.dtype
        return PushedWeights(self._model, self.gather, self.shape_of, dtype=dtype, bucket_bytes=bucket_bytes)

    def pushed_digest(self) -> str:
        """Return on rank 0 the digest that servers hold after a push of this policy. Collective."""
        pairs = self.pushed_weights(_DIGESTED_BYTES).tensors(is_sender=dist.get_rank() == 0)
        return digest_of_all({name: digest_of_tensor(name, tensor.contiguous()) for name, tensor in pairs})

    @property
    def has_experts(self) -> bool:
        """Return whether a token passes only some of the weights."""
        return any(getattr(self._model.config, name, None) for name in NUM_EXPERTS)

    @property
    def digest_form(self) -> str:
        """The type of a pushed digest's weights; with adapters also the device, whose sums round differently."""
        if self._settings.lora is None:
            return self._settings.dtype
        on_gpu = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if on_gpu else torch.backends.cpu.get_cpu_capability()
        return f"{self._settings.dtype}, merged on {device}"

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context in which the LoRA adapters are off. Raises: ValueError for a policy without adapters."""
        if not adapted_layers(self._model):
            raise ValueError("this policy has no LoRA adapters: its base model is gone")
        return adapters_off(self._model)

    def _export_adapters(self, folder: Path, form: LoraForm) -> WrittenFiles:
        """Write the adapters from rank 0 as peft loads them onto the policy's first model folder."""
        named = [(name, parameter) for name, parameter in self._model.named_parameters() if ".lora_" in name]
        written: WrittenFiles = {}
        with self.gather([parameter for _, parameter in named]):
            if dist.get_rank() == 0:
                whole = {name: parameter.detach().to("cpu").clone() for name, parameter in named}
                written = write_adapters(folder, form, str(self._settings.model_dir), whole)
        dist.barrier()
        return written
