"""A transformers model inside DeepSpeed: its optimizer, state and gathered weights.

Methods that change or gather weights are collective: every rank calls them in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.models.gradient import COMPUTED_TOKENS, StepResult, Sums
from learner.models.read_back import CheckpointMismatchError, WrittenFiles
from learner.models.settings import PolicySettings
from learner.models.training.deepspeed_config import deepspeed_config, import_deepspeed
from learner.models.training.optimizer import (
    GuardedAdamW,
    NonFiniteWeightsError,
    first_non_finite,
    learning_rate_factor,
)
from learner.models.training.shards import ZeroShards
from learner.models.training.state import (
    SHARD_BYTES,
    Progress,
    digest_held_state,
    digest_of_weights,
    load_state,
    save_state,
)
from learner.models.world import own_device, reduce_max, reduce_sums, share
from protocol.settings.zero_stage import zero_stage_of

# AdamW divides by the gradient's size: a larger gradient changes weights, unless the learning rate is 0.
_CHANGING_NORM = 1e-6


class PlainEngine:
    """A whole model on this rank's device that is not trained, with the names of DeepSpeed's engine."""

    optimizer = None

    def __init__(self, model: Any) -> None:
        self.device = own_device()
        self.module = model.to(self.device)

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)


class TrainedModel:
    """Any trained model. Call `learner.models.world.join_world` first."""

    def __init__(self, make_model: Callable[[PolicySettings], Any], settings: PolicySettings, role: str) -> None:
        """make_model: returns the model in training mode. role: name of the model in errors."""
        self._deepspeed = import_deepspeed()
        torch.manual_seed(settings.seed)
        self._settings = settings
        self._role = role
        self._world_size = dist.get_world_size()
        self._zero_stage = zero_stage_of(settings.zero_stage, settings.dtype)
        model = make_model(settings)
        self._start(model, settings)
        self._shards = ZeroShards(self._deepspeed, self._engine, self._zero_stage)
        self._model = self._engine.module
        self.vocab_size = int(self._model.config.vocab_size)
        self._num_earlier = 0  # applied updates less those that the schedule counts
        self._num_changes = 0  # updates since the last save or load that must have changed weights
        self._saved_digest = ""  # digest of the master weights then
        self._num_computed = 0.0  # tokens of all ranks' passes since `take_computed`
        self.device = torch.device(self._engine.device)

    def _start(self, model: Any, settings: PolicySettings) -> None:
        """Put the model into DeepSpeed, with an optimizer if it is trained."""
        for parameter in model.parameters():
            if parameter.is_floating_point():  # some models keep a few in float32, which ZeRO 3 refuses
                parameter.data = parameter.data.to(getattr(torch, settings.dtype))
        if not settings.is_trained:
            model.requires_grad_(False)
            if self._zero_stage != 3:
                share(model.parameters())
                self._zero_stage = 0
                self._engine: Any = PlainEngine(model)
                return
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = None
        if settings.is_trained:
            optimizer = _make_optimizer(parameters, settings, self._zero_stage)
            self._scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule_of(settings))
        config = deepspeed_config(
            settings.deepspeed,
            zero_stage=self._zero_stage,
            dtype=settings.dtype,
            max_grad_norm=settings.max_grad_norm,
            offload=settings.offload if settings.is_trained else "none",
            num_parameters=max(1, sum(parameter.numel() for parameter in parameters)),
        )
        if self._zero_stage == 3:
            # Broadcasts a parameter from rank 0 and keeps this rank's part, one after the other. In the other stages
            # `initialize` broadcasts them.
            self._deepspeed.zero.Init(module=model, config_dict_or_path=config)
            for buffer in model.buffers():  # `Init` moves parameters alone
                buffer.data = buffer.data.to(own_device())
        self._engine, *_ = self._deepspeed.initialize(
            model=model,
            model_parameters=parameters or None,
            optimizer=optimizer,
            lr_scheduler=None if optimizer is None else self._scheduler,
            config=config,
            dist_init_required=False,
        )

    def update(self, sums: Sums, global_weight: float, *, is_divided: bool = True) -> StepResult:
        """Return the outcome of one optimizer update with the accumulated gradient.

        sums: this rank's, with the same keys on every rank. "loss" is divided by global_weight. is_divided: False: the
        gradient is not yet, so it is now.
        """
        lr = self.learning_rate
        self._engine.optimizer.cur_scale = 1.0 if is_divided else global_weight
        self._engine.step()
        self._engine.optimizer.cur_scale = 1.0
        reduced = _reduce(sums)
        self._num_computed += reduced.pop(COMPUTED_TOKENS)
        norm = self._engine.get_global_grad_norm()
        result = StepResult(
            applied=bool(self._engine.was_step_applied()),
            loss=reduced.pop("loss") / global_weight,
            grad_norm=float(norm) if norm is not None else float("nan"),
            sums=reduced,
            lr=lr,
        )
        if not result.applied:
            self._shards.drop_gradient()
        self._num_changes += result.applied and lr > 0.0 and result.grad_norm > _CHANGING_NORM
        return result

    def take_computed(self) -> float:
        """Return the tokens of all ranks' forward and backward passes since the last call."""
        taken, self._num_computed = self._num_computed, 0.0
        return taken

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next update."""
        return float(max(group["lr"] for group in self._scheduler.optimizer.param_groups))

    def state_digests(self) -> dict[str, str]:
        """Return KEY/NAME -> digest of each master weight and moment in memory. Collective; nothing is gathered."""
        return digest_held_state(self._shards, self.weights(), self.device)

    def check_finite(self, *, with_optimizer: bool = False) -> None:
        """Raise NonFiniteWeightsError on every rank when a weight of any rank is not finite. Collective.

        with_optimizer: checks the optimizer's state too. Each rank reads its own memory once.
        """
        found = first_non_finite(self._own_tensors(with_optimizer))
        if reduce_max(float(found is not None), self.device):
            where = f"{found} on rank {dist.get_rank()}" if found is not None else "a tensor on another rank"
            raise NonFiniteWeightsError(
                f"the {self._role} is not finite: {where} holds NaN or infinity. Nothing was pushed or saved. "
                "Run the same command again to resume from the newest checkpoint"
            )

    def weights(self) -> list[tuple[str, Tensor]]:
        """Return (name, trained parameter) in the model's order, a tied head once. In ZeRO 3 they are partitioned."""
        return [(name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad]

    def gather(self, parameters: Sequence[Tensor], writer: int | None = None) -> Any:
        """Return a context in which these parameters are whole on every rank. Collective.

        writer: rank whose changes every rank gets; None: nobody changes them.
        """
        enabled = self._zero_stage == 3
        return self._deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=writer, enabled=enabled)

    def shape_of(self, parameter: Tensor) -> tuple[int, ...]:
        """Return a parameter's whole shape; `parameter.shape` is 0 in ZeRO 3."""
        return self._shards.shape_of(parameter)

    def save_state(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> WrittenFiles:
        """Write master weights, moments and the number of updates; returns this rank's files. Collective.

        shard_bytes: size of one file, and of other ranks' state in this rank's memory.
        Raises: OSError when the disk refuses; CheckpointMismatchError on every rank when updates since the last save or
        load did not change the weights.
        """
        digests = self.state_digests()
        digest = digest_of_weights(digests)
        if self._num_changes and digest == self._saved_digest:
            raise CheckpointMismatchError(
                f"The weights of the {self._role} have the digest {digest}, as in the checkpoint before, although "
                f"{self._num_changes} updates were applied since"
            )
        done = int(self._scheduler.last_epoch)
        progress = Progress(self._num_earlier + done, done / self._settings.updates_per_step)
        written = save_state(folder, self._shards, self.weights(), progress, digests, shard_bytes)
        self._num_changes, self._saved_digest = 0, digest
        return written

    def load_state(self, folder: Path) -> None:
        """Load files of `save_state` from any number of ranks, ZeRO stage and type. Collective.

        The learning rate follows this run's settings from the saved step of the schedule on, also with another number
        of updates per step.
        Raises: OperatorError when the state is of another model.
        """
        num_updates, steps = load_state(folder, self._shards, self.weights())
        done = round(steps * self._settings.updates_per_step)
        self._num_earlier = num_updates - done
        self._scheduler.load_state_dict({"last_epoch": done, "_step_count": done + 1, "lr_lambdas": [None]})
        for group, peak in zip(self._scheduler.optimizer.param_groups, self._scheduler.base_lrs, strict=True):
            group["lr"] = peak * _schedule_of(self._settings)(done)
        self._num_changes, self._saved_digest = 0, digest_of_weights(self.state_digests())

    def _own_tensors(self, with_optimizer: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parts of the weights, and of the optimizer's state."""
        for name, parameter in self._model.named_parameters():
            yield name, self._shards.own_part(parameter)
        if not with_optimizer:
            return
        optimizer = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        if self._zero_stage != 3:
            for group in optimizer.param_groups:
                for number, master in enumerate(group["params"]):
                    yield f"master weights {number}", master
        for number, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"optimizer state {key} {number}", value


def _make_optimizer(parameters: list[Any], settings: PolicySettings, zero_stage: int) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if zero_stage == 0:
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


def _reduce(sums: Sums) -> dict[str, float]:
    """Return the sums over all ranks. Every rank passes the same keys."""
    added = sorted(key for key in sums if not key.startswith("max_"))
    largest = sorted(sums.keys() - set(added))
    reduced = dict(zip(added, reduce_sums(torch.stack([sums[key] for key in added])), strict=True))
    return reduced | {key: reduce_max(float(sums[key]), sums[key].device) for key in largest}
