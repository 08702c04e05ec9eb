"""The verdict that shows nothing: why a proof was not made. Imports no torch."""

import signal
from pathlib import Path

from learner.checkpoint.proof import Proof, manifest_hash
from learner.rank.proof.request import ProofRequest


def not_made(request: ProofRequest, problem: str, seconds: float) -> Proof:
    return Proof(
        verdict="not made",
        problem=problem,
        step=request.told.step,
        seconds=seconds,
        manifest=manifest_hash(Path(request.folder)),
    )


def how_it_ended(status: int) -> str:
    """Return how a process ended, for people. status: as Python has it, below 0 for a signal."""
    if status >= 0:
        return f"ended with status {status}"
    because = ", as for a lack of memory" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{because}"
