"""A checkpoint's last two phases in one call, for tests that compare no tensors in between."""

from pathlib import Path

from learner.checkpoint.folder import publish, seal
from learner.checkpoint.manifest import Checkpoint
from learner.checkpoint.sealed_files import Tell, quiet


def commit(aside: Path, checkpoint: Checkpoint, tell: Tell = quiet) -> Checkpoint:
    """Return the checkpoint of the folder `aside` after sealing and publishing it."""
    seal(aside, checkpoint, tell)
    return publish(aside, checkpoint.step, tell)
