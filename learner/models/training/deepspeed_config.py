"""DeepSpeed's configuration for a policy, and its import without what a learner does not want."""

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from protocol.errors import SettingsError

# What a step is made of is the learner's to say: with another value here, gradients would be scaled twice.
_OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "amp",
)
_MAX_REDUCE_NUMEL = 500_000_000


def import_deepspeed() -> Any:
    """Return the deepspeed module. Raises: ImportError when it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its shared-memory collectives serve inference alone, and cost 20 s of compiling at the first start.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_config(
    asked: Mapping[str, Any],
    *,
    zero_stage: int,
    dtype: str,
    max_grad_norm: float,
    num_parameters: int,
    offload: str = "none",
) -> dict[str, Any]:
    """Return the configuration with the operator's `asked` merged in, section by section.

    offload: none, optimizer or all, as learner.offload says.

    Raises: SettingsError for a key that other settings say, and for an optimizer kept on NVMe.
    """
    _check(asked)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # Every step() ends an accumulation, however many backward passes came before it: their number varies.
        "managed_gradient_accumulation": False,
        # Stage 0 clips in GuardedAdamW, which has to see the norm before it decides.
        "gradient_clipping": max_grad_norm if zero_stage else 0.0,
        "zero_optimization": {
            "stage": zero_stage,
            # DeepSpeed allocates a buffer of this many elements, however small the model.
            "reduce_bucket_size": min(_MAX_REDUCE_NUMEL, num_parameters),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 60,
    }
    if offload != "none":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if offload == "all":
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if dtype == "bfloat16":
        # Without the check DeepSpeed takes a bfloat16 step on a gradient that is not finite.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(config, asked)


def _check(asked: Mapping[str, Any]) -> None:
    """Raise SettingsError for what the operator may not say here."""
    for key in _OWNED:
        if key in asked:
            raise SettingsError(
                f"settings: learner.deepspeed sets {key}, which follows from the other settings. Remove it."
            )
    if "stage" in (asked.get("zero_optimization") or {}):
        raise SettingsError(
            "settings: learner.deepspeed sets zero_optimization.stage, which learner.zero_stage says. "
            "Remove it, and set learner.zero_stage."
        )
    asked_offload = (asked.get("zero_optimization") or {}).get("offload_optimizer") or {}
    if asked_offload.get("device") == "nvme":
        raise SettingsError(
            "settings: learner.deepspeed keeps the optimizer on NVMe, from where checkpoints cannot take it. "
            "Set zero_optimization.offload_optimizer.device to cpu."
        )


def _merged(ours: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in asked.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
