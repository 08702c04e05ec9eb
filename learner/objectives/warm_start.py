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
from typing import Any

import torch.distributed as dist

from learner.data.sft_rows import load_rows
from learner.disk.model_folder import is_readable, model_digest
from learner.models.roles import load_policy
from learner.models.settings import PolicySettings, policy_settings
from learner.models.world import own_device, reduce_max
from learner.objectives.supervised import run_sft
from protocol.errors import OperatorError
from protocol.node.home import sluice_home
from protocol.node.keeper_files import reader_of
from protocol.node.model_copy import have_model
from protocol.node.model_files import ModelFiles, describe_model
from protocol.ray_calls import own_node_id
from protocol.settings.settings import Settings

# How rows become tokens; another number when that changes, so that models of the old way are not found again.
_TOKENS_FORM = 2


def warm_start(
    settings: Settings, model: Path, tell: Callable[[str], None], node_id: Callable[[], str] = own_node_id
) -> Path:
    """Return the folder of the warm-started model, made now unless it was made before. All ranks call it together.

    node_id: returns Ray's id of this rank's node; asked where another node has another model or none.
    Raises: OperatorError when this rank's node does not have the demonstrations.
    """
    _check_here(settings)
    wanted = sluice_home() / "cache" / f"warm_start-{content_key(settings, model)}"
    # Rank 0 decides: ranks of other nodes have a cache of their own, and would wait in collectives that rank 0 skips.
    is_found = reduce_max(float(dist.get_rank() == 0 and is_readable(wanted)), own_device())
    if is_found:
        tell("warm start found in the cache")
    else:
        _make(settings, model, wanted, tell)
    return _on_this_node(wanted, node_id)


def _check_here(settings: Settings) -> None:
    data = settings.policy.warm_start.data
    assert data is not None
    if not Path(data).is_file():
        raise OperatorError(
            f"policy.warm_start.data = {data} is not on the node of a learner rank ({socket.gethostname()}). Put it on "
            "a disk that the command's node and those of the ranks share, or place the ranks on the command's node."
        )


def _on_this_node(wanted: Path, node_id: Callable[[], str]) -> Path:
    """Return the model's folder on this rank's node: copied from rank 0's where that is another one, or none.

    Two nodes that made it each for itself have models of one name and of slightly other weights: DeepSpeed tells all
    ranks rank 0's policy, but each would have a reference of its own. All ranks call it together.
    Raises: as `have_model`.
    """
    is_first = dist.get_rank() == 0
    told: ModelFiles = _told_by_first(describe_model(wanted, "") if is_first else None)
    is_here = told.is_at(wanted, with_weights=True)
    if not reduce_max(float(not is_here), own_device()):
        return wanted
    of_first: str = _told_by_first(node_id() if is_first else None)
    if is_here:
        return wanted
    return have_model(told.model_copy(update={"node_id": of_first}), reader_of(of_first), with_weights=True)


def _told_by_first(value: Any) -> Any:
    """Return what rank 0 gave; the others give None. All ranks call it together."""
    told = [value]
    dist.broadcast_object_list(told, src=0, device=own_device())
    return told[0]


def _make(settings: Settings, model: Path, wanted: Path, tell: Callable[[str], None]) -> None:
    """Train, and write the model to `wanted` from rank 0."""
    warm = settings.policy.warm_start
    assert warm.data is not None
    micro_batch_tokens = settings.learner.micro_batch_tokens
    engine = load_policy(
        warm_start_settings(settings, model), name=settings.policy.model, micro_batch_tokens=micro_batch_tokens
    )
    run_sft(
        engine,
        load_rows(Path(warm.data), model),
        rows_per_step=warm.rows_per_step,
        max_steps=warm.max_steps,
        micro_batch_tokens=micro_batch_tokens,
        on_step=lambda step, loss: tell(f"warm start {step}/{warm.max_steps} loss {loss:.3f}"),
    )
    aside = wanted.with_name(f".{wanted.name}.making")
    engine.export_hf(aside)
    if dist.get_rank() == 0:
        shutil.rmtree(wanted, ignore_errors=True)  # one that cannot be read
        aside.rename(wanted)
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
        temperature=1.0,
    )


def content_key(settings: Settings, model: Path) -> str:
    """Return what names the result: a digest of the model, the rows and every setting that the warm start takes."""
    warm = settings.policy.warm_start
    assert warm.data is not None
    digest = hashlib.sha256(model_digest(model).encode())
    for path in [*sorted(model.glob("*.safetensors")), Path(warm.data)]:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    taken = asdict(warm_start_settings(settings, model))
    # Rows are taken in file order and the weights come from the folder, so that nothing is drawn by the seed.
    for name in ("model_dir", "seed"):
        del taken[name]
    numbers = {
        "policy": taken,
        "steps": warm.model_dump(mode="json", exclude={"data"}),
        "micro_batch_tokens": settings.learner.micro_batch_tokens,
        "tokens": _TOKENS_FORM,
    }
    digest.update(json.dumps(numbers, sort_keys=True).encode())
    return digest.hexdigest()[:16]
