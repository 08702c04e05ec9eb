"""Whether the disk can hold a run's checkpoints, by the parts of each, checked before anything starts."""

import shutil
import tempfile
from pathlib import Path

from learner.disk.model_folder import BYTES
from learner.plan.memory import Sizes
from learner.plan.needs import is_reference_kept, is_reference_the_base, needs_critic, needs_reference
from protocol.disk.files import naming_disk_errors
from protocol.errors import OperatorError
from protocol.settings.settings import Settings

_STATE_BYTES = 12  # bytes of a trained parameter: its master weight and two AdamW moments, float32
_OTHER_BYTES = 64 << 20  # ledger, logs, metrics, descriptions


def check_disk(folder: Path, settings: Settings, sizes: Sizes) -> None:
    """Raise OperatorError when the disk cannot hold the run's checkpoints or cannot be written."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    with naming_disk_errors(f"{existing} cannot be written", "Set run.dir to a folder of your own."):
        # Permissions would not tell: root has them all, on a read-only disk too.
        tempfile.TemporaryFile(dir=existing).close()
    needed = _num_checkpoints(settings) * checkpoint_bytes(settings, sizes) + _OTHER_BYTES
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise OperatorError(
            f"{existing} has {free >> 20} MiB free; this run's checkpoints need about {needed >> 20} MiB. "
            "Free some, set run.dir to a larger disk, or lower learner.keep_checkpoints."
        )


def checkpoint_bytes(settings: Settings, sizes: Sizes) -> int:
    """Return the bytes of one checkpoint's weights and states, for each role of the run.

    Not counted is the critic of a user's own advantage, which is not known before its file is imported.
    """
    policy, width = sizes.policy, BYTES[settings.policy.dtype]
    total = policy.parameters * width + policy.adapters * width + _STATE_BYTES * (policy.adapters or policy.parameters)
    if needs_critic(settings):
        critic = sizes.critic or policy
        total += _STATE_BYTES * critic.parameters  # adapters are the policy's alone
    if needs_reference(settings) and is_reference_kept(settings) and not is_reference_the_base(settings):
        total += (sizes.reference or policy).parameters * width
    return total


def _num_checkpoints(settings: Settings) -> int:
    """Return the largest number of checkpoints on disk: the kept, the best, one being written and one being copied."""
    learner = settings.learner
    others = (settings.eval.best is not None) + (learner.copy_checkpoints_to is not None)
    return learner.keep_checkpoints + others + 1
