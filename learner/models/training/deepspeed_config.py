"""DeepSpeed's configuration for a trained model, and its import."""

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

_MAX_REDUCE_NUMEL = 500_000_000


def import_deepspeed() -> Any:
    """Return the deepspeed module. Raises: ImportError when it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # set here: the import sets a level of its own
    # DeepSpeed's shared-memory collectives are for inference, and take 20 s to compile at the first start.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_config(
    given: Mapping[str, Any],
    *,
    zero_stage: int,
    dtype: str,
    max_grad_norm: float,
    num_parameters: int,
    offload: str = "none",
) -> dict[str, Any]:
    """Return the configuration with the operator's `given` merged in, section by section.

    offload: none, optimizer or all (learner.offload).
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # Every step() ends an accumulation: the number of backward passes before it varies.
        "managed_gradient_accumulation": False,
        # Stage 0 clips in GuardedAdamW, which checks the norm first.
        "gradient_clipping": max_grad_norm if zero_stage else 0.0,
        "zero_optimization": {
            "stage": zero_stage,
            # DeepSpeed allocates a buffer of this size even for a small model.
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
        # Without the check DeepSpeed applies a bfloat16 step with a gradient that is not finite.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merge(config, given)


def _merge(ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in given.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
