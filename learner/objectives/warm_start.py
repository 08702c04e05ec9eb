"""The warm start: supervised fine-tuning before the first step, done once for a given model, data and settings.

The result is kept under SLUICE_HOME/cache and found again by content.
"""

import hashlib
import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch.distributed as dist

from learner.data.sft_rows import load_rows
from learner.disk.model_folder import is_readable, weights_digest
from learner.models.roles import load_policy
from learner.models.settings import PolicySettings, policy_settings
from learner.models.world import own_device, reduce_max
from learner.objectives.supervised import run_sft
from protocol.errors import OperatorError
from protocol.node.home import sluice_home
from protocol.node.small_model_files import read_small_files, small_files_digest
from protocol.settings.settings import Settings

# How rows become tokens; another number when that changes, so that models of the old way are not found again.
_TOKENS_FORM = 5


def warm_start(settings: Settings, model: Path, tell: Callable[[str], None]) -> Path:
    """Return the folder of the warm-started model on rank 0, made now unless it was made before; `model` elsewhere.

    Other ranks need the small files alone, which are those of `model`. Collective.
    Raises: OperatorError when this rank's node does not have the demonstrations.
    """
    _check_here(settings)
    is_first = dist.get_rank() == 0
    made = sluice_home() / "cache" / f"warm_start-{content_key(settings, model)}" if is_first else model
    if reduce_max(float(is_first and is_readable(made)), own_device()):
        tell("warm start found in the cache")
    else:
        _make(settings, model, made, tell)
    return made


def _check_here(settings: Settings) -> None:
    data = settings.policy.warm_start.data
    assert data is not None
    if not Path(data).is_file():
        raise OperatorError(
            f"policy.warm_start.data = {data} is not on the node of a learner rank ({socket.gethostname()}). Put it on "
            "a disk that the command's node and those of the ranks share, or place the ranks on the command's node."
        )


def _make(settings: Settings, model: Path, made: Path, tell: Callable[[str], None]) -> None:
    """Train, and write the model to `made` from rank 0."""
    warm = settings.policy.warm_start
    assert warm.data is not None
    micro_batch_tokens = settings.learner.micro_batch_tokens
    rows = load_rows(Path(warm.data), model, trust_remote_code=settings.policy.trust_remote_code)
    of_warm_start = warm_start_settings(settings, model)
    # The model is checked at the longest text that it computes.
    longest = max([of_warm_start.max_tokens, *(len(row.tokens) for row in rows)])
    engine = load_policy(replace(of_warm_start, max_tokens=longest), name=settings.policy.model)
    run_sft(
        engine,
        rows,
        rows_per_step=warm.rows_per_step,
        max_steps=warm.max_steps,
        micro_batch_tokens=micro_batch_tokens,
        on_step=lambda step, loss: tell(f"warm start {step}/{warm.max_steps} loss {loss:.3f}"),
    )
    aside = made.with_name(f".{made.name}.making")  # written on rank 0 alone
    engine.export_hf(aside)
    if dist.get_rank() == 0:
        shutil.rmtree(made, ignore_errors=True)  # one that cannot be read
        aside.rename(made)
    dist.barrier()


def warm_start_settings(settings: Settings, model: Path) -> PolicySettings:
    """Return the policy as the warm start trains it: at temperature 1, as every reader of the model computes it."""
    warm = settings.policy.warm_start
    return replace(
        policy_settings(settings, model),
        lr=warm.lr,
        betas=warm.betas,
        warmup_steps=warm.lr_warmup_steps,
        total_steps=warm.max_steps,
        min_lr_ratio=warm.min_lr_ratio,
        schedule="linear",
        updates_per_step=1,
        temperature=1.0,
    )


def content_key(settings: Settings, model: Path) -> str:
    """Return what names the result: a digest of the model, the rows and every setting that the warm start takes."""
    warm = settings.policy.warm_start
    assert warm.data is not None
    files = read_small_files(model, with_code=settings.policy.trust_remote_code)
    digest = hashlib.sha256(f"{small_files_digest(files)} {weights_digest(model)}".encode())
    with Path(warm.data).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    taken = asdict(warm_start_settings(settings, model))
    # Rows are taken in file order and the weights come from the folder, so that nothing is drawn by the seed.
    others = ("model_dir", "seed", "role", "max_tokens", "micro_batch_tokens", "is_trained", "updates_per_step")
    for name in others:
        del taken[name]
    numbers = {
        "policy": taken,
        "steps": warm.model_dump(mode="json", exclude={"data"}),
        "micro_batch_tokens": settings.learner.micro_batch_tokens,
        "tokens": _TOKENS_FORM,
    }
    digest.update(json.dumps(numbers, sort_keys=True).encode())
    return digest.hexdigest()[:16]
