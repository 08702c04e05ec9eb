"""What a verdict does to a checkpoint's folder: `latest` moves to a proven one, a refused one loses its name.

refused_step_000100   is not what the ranks meant to write; the newest of these stays for whoever looks into it
"""

from pathlib import Path

from learner.checkpoint.best import BEST
from learner.checkpoint.folder import LATEST, point_latest, remove, set_aside, step_of
from learner.checkpoint.proof import Proof, is_proven, manifest_hash, read_proof, write_proof
from protocol.disk.files import sync
from protocol.failpoints import failpoint

REFUSED = "refused_"


def settle(root: Path, path: Path, proof: Proof) -> Path:
    """Act on the verdict on the checkpoint `path` of the folder `root`; returns where it is now. Raises: OSError.

    A folder whose manifest is not the one that was proven was replaced meanwhile, or removed: nothing is done then.
    """
    if not proof.manifest or manifest_hash(path) != proof.manifest:
        return path
    failpoint("proof.verdict_known")
    write_proof(path, proof)
    failpoint("proof.verdict_written")
    if proof.verdict == "proven" and proof.step >= latest_step(root):
        point_latest(root, path)
    if proof.verdict == "refused":
        path = _refuse(root, path)
        failpoint("proof.refused_set_aside")
    return path


def latest_step(root: Path) -> int:
    """Return the step of the checkpoint that `latest` names, -1 when it names none."""
    latest = root / LATEST
    name = latest.readlink().name.removeprefix("step_") if latest.is_symlink() else ""
    return int(name) if name.isascii() and name.isdecimal() else -1  # somebody may have linked it elsewhere


def complaints(root: Path) -> dict[str, str]:
    """Return what is to be said of checkpoints that are not proven, by the folder's name; none of those without a
    verdict."""
    found = {}
    for path in sorted([*root.glob(f"{REFUSED}step_*"), *root.glob("step_*")]):
        proof = read_proof(path)
        if proof is not None and proof.verdict != "proven":
            found[f"{path.name}: {proof.manifest}"] = complaint(proof, path)
    return found


def complaint(proof: Proof, path: Path) -> str:
    """Return the sentences that tell people of a checkpoint that is not proven."""
    if proof.verdict == "refused":
        return (
            f"The checkpoint of step {proof.step} is refused: {proof.problem}. It is kept as {path}, for nobody to go "
            "on from; the checkpoints before it are as they were."
        )
    return (
        f"The checkpoint of step {proof.step} could not be proven: {proof.problem}. Nothing is shown against it, and "
        "`latest` stays at the one before it. Give the proof memory or time (learner.proof_timeout_s), or set "
        "learner.prove_checkpoints to false."
    )


def newest_proven(root: Path) -> Path | None:
    """Return the folder of the newest proven checkpoint, None without one."""
    proven = [path for path in root.glob("step_*") if path.name.removeprefix("step_").isdecimal() and is_proven(path)]
    return max(proven, key=step_of, default=None)


def _refuse(root: Path, path: Path) -> Path:
    best = root / BEST
    if best.is_symlink() and best.readlink().name == path.name:
        best.unlink()
        sync(root)
    refused = set_aside(root, path, REFUSED)
    for older in root.glob(f"{REFUSED}step_*"):
        if older != refused:
            remove(older)
    return refused
