"""What a policy model is built and optimised with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from protocol.settings.settings import Settings


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


def policy_settings(settings: Settings, model: Path) -> PolicySettings:
    """Return the policy as reinforcement learning trains it."""
    learner = settings.learner
    return PolicySettings(
        model_dir=model,
        dtype=settings.policy.dtype,
        zero_stage=learner.zero_stage,
        lr=learner.lr,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        warmup_steps=learner.lr_warmup_steps,
        total_steps=settings.run.max_steps,
        min_lr_ratio=learner.min_lr_ratio,
        schedule=learner.lr_schedule,
        deepspeed=learner.deepspeed,
        gradient_checkpointing=learner.gradient_checkpointing,
        seed=settings.run.seed,
        temperature=settings.rollout.temperature,
        trust_remote_code=settings.policy.trust_remote_code,
    )
