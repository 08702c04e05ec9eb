"""Saving and loading of a run's state by all ranks together: weights, optimizer, the ledger's copy, then the manifest.

Called by `learner.rank`.
"""

from pathlib import Path

import torch.distributed as dist

from learner.checkpoint import Checkpoint, aside_folder, begin, commit, rotate
from learner.coordinator_client import CoordinatorClient
from learner.policy import PolicyEngine
from learner.run_folder import CHECKPOINTS, LEDGER, model_digest
from protocol.errors import OperatorError


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
        policy.export_hf(aside / "model")
    except (OSError, RuntimeError) as error:
        raise OperatorError(
            f"The checkpoint {aside} cannot be written: {error}. The earlier checkpoints are intact. "
            "Make room, then run the same command again to go on from the newest."
        ) from None
    if is_first:
        coordinator.save_ledger(aside / LEDGER, step)
        commit(aside, Checkpoint(aside, step, policy_version, folder.name, model_digest(model)))
        rotate(root, keep)
    dist.barrier()


def load_checkpoint(policy: PolicyEngine, checkpoint: Checkpoint) -> tuple[int, int]:
    """Return (step, policy version) of a verified checkpoint, now loaded into the policy."""
    policy.load_state(checkpoint.path / "state")
    return checkpoint.step, checkpoint.policy_version
