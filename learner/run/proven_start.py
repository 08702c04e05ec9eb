"""A start from a checkpoint that nobody has proven yet: it is proven now, or another one is taken."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from learner.checkpoint.manifest import Checkpoint, CorruptCheckpointError
from learner.checkpoint.proof import Proof, manifest_hash, read_proof
from learner.checkpoint.told import read_told
from learner.checkpoint.verdicts import complaint, settle
from learner.disk.layout import CHECKPOINTS
from learner.rank.proof.proofs import Prove
from learner.run.start import RunStart, plan_restart
from protocol.errors import OperatorError


def proven_start(
    start: RunStart,
    prove: Prove | None,
    is_stopped: Callable[[], bool],
    phase: Callable[[str], None],
    message: Callable[[str], None],
) -> RunStart:
    """Return where the run starts: at this start's checkpoint when it is proven, or at the newest before it that is.

    One from before proofs is taken as it is. So is one whose proof could not be made, since nothing is shown against
    it. The folder is this command's: a refused checkpoint is set aside. prove: None where the settings want no proofs:
    what was refused before stays refused. phase, message: take what is to be seen.
    Raises: OperatorError when the operator named a checkpoint that is refused and is none of this run's steps, and when
    a verdict cannot be written.
    """
    while (checkpoint := start.checkpoint) is not None:
        proof = _verdict(checkpoint, prove, is_stopped, phase)
        if proof is None:
            break
        is_own = _is_a_step_of(start.folder, checkpoint)
        path = _settle(checkpoint.path, proof) if is_own else checkpoint.path
        if proof.verdict == "not made":
            message(f"{complaint(proof, path)} The run goes on from it.")
        if proof.verdict != "refused":
            break
        if not is_own:
            raise OperatorError(
                f"The checkpoint {checkpoint.path} is refused: {proof.problem}. Name another one by run.resume."
            )
        start = replace(plan_restart(replace(start, checkpoint=None)), notice=start.notice, seen=start.seen)
        message(f"{complaint(proof, path)} The run starts from step {start.step}.")
    return start


def _is_a_step_of(folder: Path, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is one of the run's steps, and none that was set aside or lies elsewhere."""
    root, name = checkpoint.path.parent, checkpoint.path.name
    return root.resolve() == (folder / CHECKPOINTS).resolve() and name == f"step_{checkpoint.step:06d}"


def _settle(path: Path, proof: Proof) -> Path:
    try:
        return settle(path.parent, path, proof)
    except OSError as error:
        raise OperatorError(
            f"The verdict on the checkpoint {path} cannot be written: {error.strerror}. Free the disk, or make the "
            "folder writable, then run the same command again."
        ) from None


def _verdict(
    checkpoint: Checkpoint, prove: Prove | None, is_stopped: Callable[[], bool], phase: Callable[[str], None]
) -> Proof | None:
    """Return the verdict on a checkpoint, reached now where there is none; None: proven before, or nothing to prove."""
    known = read_proof(checkpoint.path)
    if known is not None and known.verdict == "proven":
        return None
    if known is not None and known.verdict == "refused":  # a death came before its folder could be set aside
        return known
    if prove is None:
        return None
    try:
        told = read_told(checkpoint.path)
    except CorruptCheckpointError as error:
        manifest = manifest_hash(checkpoint.path)
        return Proof(verdict="refused", problem=str(error), step=checkpoint.step, manifest=manifest)
    if told is None:
        return None
    phase(f"proving the checkpoint of step {checkpoint.step}")
    return prove(checkpoint.path, told, is_stopped, lambda: True)
