"""Settings of a small trained model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from learner.models.settings import PolicySettings


def small_policy_settings(model: Path, **changes: Any) -> PolicySettings:
    """Return float32 settings on one rank with a constant learning rate of 0.001; `changes` replace fields."""
    plain = PolicySettings(
        model_dir=model,
        dtype="float32",
        zero_stage=0,
        lr=1e-3,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        max_grad_norm=1.0,
        warmup_steps=0,
        total_steps=10,
        min_lr_ratio=1.0,
        schedule="constant",
        seed=0,
    )
    return replace(plain, **changes)
