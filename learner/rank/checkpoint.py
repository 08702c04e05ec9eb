"""Saving and loading of a run's state by all ranks together, inside `learner.checkpoint.folder`'s folder and manifest:

    state/      master weights, optimizer, schedule, for any number of ranks     model/   a Hugging Face folder
    random/     each rank's random generators                                    ledger.sqlite, wandb_run_id

The place in the prompt order is in the ledger.
"""

import shutil
from pathlib import Path

import torch.distributed as dist

from learner.checkpoint.folder import aside_folder, begin, commit, rotate
from learner.checkpoint.manifest import Checkpoint
from learner.disk.layout import CHECKPOINTS, LEDGER, WANDB_ID
from learner.disk.model_folder import model_digest
from learner.models.policy import PolicyEngine
from learner.rank.coordinator_client import CoordinatorClient
from learner.rank.random_state import load_random_state, save_random_state
from protocol.errors import OperatorError
from protocol.failpoints import failpoint


def save_checkpoint(
    policy: PolicyEngine,
    coordinator: CoordinatorClient,
    folder: Path,
    model: Path,
    step: int,
    policy_version: int,
    keep: int,
) -> None:
    """Write checkpoints/step_N; all ranks call it at the same step. The folder is on a disk that all ranks share.

    Raises: OperatorError when it cannot be written, NonFiniteWeightsError on every rank when the weights or the
    optimizer's state are not finite; the earlier checkpoints are intact then.
    """
    policy.check_finite(with_optimizer=True)
    root = folder / CHECKPOINTS
    is_first = dist.get_rank() == 0
    aside = begin(root, step) if is_first else aside_folder(root, step)
    dist.barrier()
    try:
        policy.save_state(aside / "state")
        save_random_state(_random_path(aside))
        failpoint("rank_checkpoint.after_state")
        policy.export_hf(aside / "model")
        failpoint("rank_checkpoint.after_model")
        if is_first and (folder / WANDB_ID).exists():
            shutil.copyfile(folder / WANDB_ID, aside / WANDB_ID)
    except (OSError, RuntimeError) as error:
        raise OperatorError(
            f"The checkpoint {aside} cannot be written: {error}. The earlier checkpoints are intact. "
            "Make room, then run the same command again to go on from the newest."
        ) from None
    if is_first:
        coordinator.save_ledger(aside / LEDGER, step)
        failpoint("rank_checkpoint.after_ledger")
        commit(aside, Checkpoint(aside, step, policy_version, folder.name, model_digest(model)))
        rotate(root, keep)
    failpoint("rank_checkpoint.before_barrier")
    dist.barrier()


def load_checkpoint(policy: PolicyEngine, checkpoint: Checkpoint) -> tuple[int, int]:
    """Return (step, policy version) of a verified checkpoint, now loaded into the policy."""
    policy.load_state(checkpoint.path / "state")
    load_random_state(_random_path(checkpoint.path))
    failpoint("rank_checkpoint.state_loaded")
    return checkpoint.step, checkpoint.policy_version


def _random_path(folder: Path) -> Path:
    return folder / "random" / f"rank_{dist.get_rank():05d}.json"
