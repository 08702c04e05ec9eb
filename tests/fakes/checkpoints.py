"""A checkpoint's last two phases in one call, for tests that compare no tensors in between."""

from pathlib import Path

from learner.checkpoint.folder import publish, seal
from learner.checkpoint.manifest import Checkpoint
from learner.checkpoint.sealed_files import Report, no_report


def commit(aside: Path, checkpoint: Checkpoint, report: Report = no_report) -> Checkpoint:
    """Return the checkpoint of the folder `aside` after sealing and publishing it."""
    seal(aside, checkpoint, report)
    return publish(aside, checkpoint.step, report)
