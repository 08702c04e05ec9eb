"""The policy under training: a transformers model inside DeepSpeed. The one file that imports deepspeed.

Owned by a learner rank. What changes or gathers weights is collective: every rank calls it in the same order.
Shapes: K model tokens of a micro-batch.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed import initialize
from deepspeed import zero as deepspeed_zero
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner import varlen_attention
from learner.microbatch import MicroBatch
from learner.optimizer import GuardedAdamW
from learner.schedule import learning_rate_factor
from learner.world import reduce_max, reduce_sums

# Sums over a micro-batch's tokens, for metrics; keys that start with "max_" are reduced by maximum.
Sums = dict[str, float]
LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Sums]]


@dataclass(frozen=True)
class PolicySettings:
    """temperature: of sampling; logprobs are those of the distribution that was sampled from."""

    model_dir: Path
    dtype: Literal["float32", "bfloat16"]
    zero_stage: Literal[0, 2, 3]
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    warmup_steps: int
    total_steps: int
    min_lr_ratio: float
    schedule: Literal["constant", "linear", "cosine"]
    seed: int
    temperature: float = 1.0
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class StepResult:
    """applied: False when a loss or gradient was not finite; weights and optimizer are then as before the step."""

    applied: bool
    loss: float
    grad_norm: float
    sums: Sums


class PolicyEngine:
    """torch.distributed has been initialised by `learner.world.join_world`."""

    def __init__(self, settings: PolicySettings) -> None:
        torch.manual_seed(settings.seed)
        varlen_attention.register()
        self._settings = settings
        self._world_size = dist.get_world_size()
        model = _load_model(settings)
        self.vocab_size = int(model.config.vocab_size)
        self._is_tied = bool(model.config.tie_word_embeddings)
        parameters = list(model.parameters())
        optimizer = _make_optimizer(parameters, settings)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule_of(settings))
        self._engine, *_ = initialize(
            model=model,
            model_parameters=parameters,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=_deepspeed_config(settings),
            dist_init_required=False,
        )
        self._model: PreTrainedModel = self._engine.module
        self.device = torch.device(self._engine.device)

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        global_weight: float,
        *,
        with_entropy: bool = True,
    ) -> StepResult:
        """Return what one optimizer step did: its gradient is that of sum(losses over all ranks) / global_weight.

        loss_function: (logprobs [K], entropies [K], micro-batch) -> (sum of token losses, sums for metrics). Every rank
        brings the same number of micro-batches. with_entropy: False saves the loss that needs none, and gives it zeros.
        """
        losses, sums = [], Sums()
        for micro_batch in micro_batches:
            logprobs, entropies = self._forward(micro_batch, with_entropy=with_entropy)
            loss, parts = loss_function(logprobs, entropies, micro_batch)
            # A loss that is not finite can have a finite gradient (a clipped infinity). Times NaN it has none, so that
            # the check of the reduced gradient stops every rank. Times 1 otherwise, without waiting for the value.
            poisoned = loss * (loss.detach() * 0.0 + 1.0)
            # DeepSpeed averages over the ranks; what is wanted is the sum.
            self._engine.backward(poisoned * (self._world_size / global_weight))
            losses.append(loss.detach())
            _merge(sums, parts)
        self._engine.step()
        sums["loss"] = float(torch.stack(losses).double().sum())
        reduced = _reduce(sums, self.device)
        norm = self._engine.get_global_grad_norm()
        return StepResult(
            applied=bool(self._engine.was_step_applied()),
            loss=reduced.pop("loss") / global_weight,
            grad_norm=float(norm) if norm is not None else float("nan"),
            sums=reduced,
        )

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """Return the model tokens' logprobs, float32 [K], at the sampling temperature or the one given.

        Collective in ZeRO 3.
        """
        return self._forward(micro_batch, temperature, with_entropy=False)[0]

    def weights(self) -> list[tuple[str, Tensor]]:
        """Return (name in the Hugging Face state dict, parameter) in the model's order, a tied head once.

        In ZeRO 3 the tensors are partitioned: `gather` makes them whole.
        """
        return list(self._model.named_parameters())

    def gather(self, parameters: Sequence[Tensor]) -> Any:
        """Return a context in which these parameters are whole on every rank. All ranks enter it together."""
        return deepspeed_zero.GatheredParameters(list(parameters), enabled=self._settings.zero_stage == 3)

    def shape_of(self, parameter: Tensor) -> tuple[int, ...]:
        """Return a parameter's whole shape; `parameter.shape` is 0 in ZeRO 3."""
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def save_state(self, folder: Path) -> None:
        """Write weights, optimizer and schedule in DeepSpeed's format; every rank writes its part."""
        self._engine.save_checkpoint(str(folder), tag="state", save_latest=False)

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote. The caller has verified the files: DeepSpeed unpickles them."""
        self._engine.load_checkpoint(str(folder), tag="state")

    def export_hf(self, folder: Path) -> None:
        """Write the policy as a Hugging Face model folder (safetensors, config, tokenizer files) from rank 0."""
        state = {}
        for name, parameter in self.weights():
            with self.gather([parameter]):
                if dist.get_rank() == 0:
                    state[name] = parameter.detach().to("cpu", copy=True)
        if dist.get_rank() == 0:
            if self._is_tied:
                state["lm_head.weight"] = state["model.embed_tokens.weight"]
            self._model.save_pretrained(folder, state_dict=state)
            copy_tokenizer(self._settings.model_dir, folder)
        dist.barrier()

    def _forward(self, micro_batch: MicroBatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """Return (logprobs [K], entropies [K]), float32; logits exist only where a model token is predicted."""
        tokens = micro_batch.tokens.to(self.device)
        logits = self._engine(
            input_ids=tokens,
            position_ids=micro_batch.position_ids.to(self.device),
            logits_to_keep=micro_batch.predict_at.to(self.device),
            segments=varlen_attention.Segments(micro_batch.lengths, self.device),
            use_cache=False,
        ).logits[0]
        distribution = (logits.float() / (temperature or self._settings.temperature)).log_softmax(-1)
        logprobs = distribution.gather(-1, micro_batch.targets.to(self.device)[:, None])[:, 0]
        with torch.no_grad():
            entropies = -(distribution.exp() * distribution).sum(-1)
        return logprobs, entropies


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy everything that describes a model but its weights and its config."""
    for path in source.iterdir():
        is_description = path.suffix in (".json", ".txt", ".model", ".jinja") and not path.name.endswith(".index.json")
        if path.is_file() and is_description and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def _load_model(settings: PolicySettings) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        settings.model_dir,
        dtype=getattr(torch, settings.dtype),
        attn_implementation=varlen_attention.NAME,
        trust_remote_code=settings.trust_remote_code,
    )
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model


def _make_optimizer(parameters: list[Any], settings: PolicySettings) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if settings.zero_stage == 0:
        return GuardedAdamW(parameters, max_grad_norm=settings.max_grad_norm, fused=True, **common)
    return torch.optim.AdamW(parameters, fused=True, **common)


def _schedule_of(settings: PolicySettings) -> Callable[[int], float]:
    return partial(
        learning_rate_factor,
        warmup_steps=settings.warmup_steps,
        total_steps=settings.total_steps,
        min_ratio=settings.min_lr_ratio,
        schedule=settings.schedule,
    )


def _deepspeed_config(settings: PolicySettings) -> dict[str, Any]:
    """Return DeepSpeed's configuration: the user's laid over ours."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # Every step() ends an accumulation, however many backward passes came before it: their number varies.
        "managed_gradient_accumulation": False,
        # Stage 0 clips in GuardedAdamW, which has to see the norm before it decides.
        "gradient_clipping": settings.max_grad_norm if settings.zero_stage else 0.0,
        "zero_optimization": {"stage": settings.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 60,
    }
    if settings.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    return config | dict(settings.deepspeed)


def _merge(sums: Sums, parts: Sums) -> None:
    for key, value in parts.items():
        sums[key] = max(sums.get(key, value), value) if key.startswith("max_") else sums.get(key, 0.0) + value


def _reduce(sums: Sums, device: torch.device) -> Sums:
    added = sorted(key for key in sums if not key.startswith("max_"))
    reduced = dict(zip(added, reduce_sums([sums[key] for key in added], device), strict=True))
    return reduced | {key: reduce_max(sums[key], device) for key in sorted(sums) if key.startswith("max_")}
