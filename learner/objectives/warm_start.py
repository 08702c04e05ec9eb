"""The warm start: supervised fine-tuning before the first step, done once for a given model, data and settings.

The result is kept under SLUICE_HOME/cache and found again by content.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed

from learner.data.sft_rows import load_rows
from learner.disk.model_folder import model_digest
from learner.models.policy import PolicyEngine
from learner.models.settings import PolicySettings, policy_settings
from learner.objectives.supervised import run_sft
from protocol.node.home import sluice_home
from protocol.settings.settings import Settings


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
