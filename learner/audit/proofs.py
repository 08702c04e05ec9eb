"""The rule that no checkpoint in its place is one that its proof refused; what is proven, and what is not, is told."""

from collections.abc import Iterator

from learner.audit.breach import Breach
from learner.audit.checkpoints import CheckpointAudit
from learner.audit.run import AuditedRun
from learner.checkpoint.folder import LATEST
from learner.checkpoint.proof import read_proof
from learner.checkpoint.told import TOLD
from learner.checkpoint.verdicts import REFUSED
from learner.disk.layout import CHECKPOINTS


def check_proofs(run: AuditedRun, audit: CheckpointAudit) -> Iterator[Breach]:
    """Yield each refused checkpoint that a start could take; `audit` gets the proven ones, and notes."""
    root = run.folder / CHECKPOINTS
    for path in run.checkpoints:
        proof = read_proof(path)
        if proof is not None and proof.verdict == "refused":
            yield Breach("checkpoint", f"is refused by its proof: {proof.problem}", f"{CHECKPOINTS}/{path.name}")
        elif proof is not None and proof.verdict == "proven":
            audit.proven.append(path.name)
    latest = root / LATEST
    if (latest / TOLD).exists() and latest.resolve().name not in audit.proven:
        audit.notes.append(f"{CHECKPOINTS}/{LATEST} names {latest.resolve().name}, which is not proven.")
    for path in sorted(root.glob(f"{REFUSED}*")):
        if (proof := read_proof(path)) is not None:
            audit.notes.append(f"{CHECKPOINTS}/{path.name} was refused by its proof: {proof.problem}.")
