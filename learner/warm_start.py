"""The warm start: supervised fine-tuning before the first step, done once for a given model, data and settings.

Called by `learner.rank` on every rank. The result is kept under SLUICE_HOME/cache and found again by content.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed

from learner.policy import PolicyEngine, PolicySettings
from learner.run_folder import model_digest
from learner.sft import run_sft
from learner.sft_data import load_rows
from protocol.home import sluice_home
from protocol.settings import Settings


def warm_start(settings: Settings, model: Path, tell: Callable[[str], None]) -> Path:
    """Return the folder of the warm-started model, made now unless it was made before. All ranks call it together."""
    wanted = sluice_home() / "cache" / f"warm_start-{_content_key(settings, model)}"
    if wanted.is_dir():
        tell("warm start found in the cache")
        return wanted
    warm = settings.policy.warm_start
    assert warm.data is not None
    rows = load_rows(Path(warm.data), model)
    engine = PolicyEngine(_warm_start_settings(settings, model))
    run_sft(
        engine,
        rows,
        rows_per_step=warm.rows_per_step,
        max_steps=warm.max_steps,
        micro_batch_tokens=settings.learner.micro_batch_tokens,
        on_step=lambda step, loss: tell(f"warm start {step}/{warm.max_steps} loss {loss:.3f}"),
    )
    aside = wanted.with_name(f".{wanted.name}.making")
    engine.export_hf(aside)
    if torch.distributed.get_rank() == 0:
        aside.rename(wanted)
    torch.distributed.barrier()
    return wanted


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


def _warm_start_settings(settings: Settings, model: Path) -> PolicySettings:
    warm = settings.policy.warm_start
    return replace(
        policy_settings(settings, model),
        lr=warm.lr,
        betas=warm.betas,
        warmup_steps=warm.lr_warmup_steps,
        total_steps=warm.max_steps,
        min_lr_ratio=warm.min_lr_ratio,
        schedule="linear",
    )


def _content_key(settings: Settings, model: Path) -> str:
    warm = settings.policy.warm_start
    assert warm.data is not None
    digest = hashlib.sha256(model_digest(model).encode())
    for path in [*sorted(model.glob("*.safetensors")), Path(warm.data)]:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    # Not run.seed: rows are taken in file order and the weights come from the folder, so nothing is drawn at random.
    numbers = warm.model_dump_json(exclude={"data"}) + settings.policy.dtype
    digest.update(numbers.encode())
    return digest.hexdigest()[:16]
