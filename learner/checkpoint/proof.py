"""The verdict on a checkpoint: proven, refused, or not made. It lies beside the manifest, which does not list it.

It names the manifest that it is about by that one's hash: the verdict on other files is none.
"""

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from learner.checkpoint.manifest import MANIFEST, PROOF
from protocol.disk.files import replace_file

Verdict = Literal["proven", "refused", "not made"]


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a fresh process found that read a checkpoint as a resume would."""

    verdict: Verdict  # refused: shown to be wrong; not made: the process ended or ran out of time, nothing is shown
    problem: str = ""  # why it is not proven, in one sentence; empty when it is
    step: int  # the checkpoint's
    digest: str = ""  # of the weights in its files as servers hold them
    loss: float | None = None  # mean negative logprob of the kept texts' tokens, by the weights in its files
    seconds: float = 0.0  # that the proof took
    cpu_s: float = 0.0  # CPU seconds of its process
    peak_mib: int = 0  # largest memory of its process, in MiB
    manifest: str = ""  # SHA-256 of the manifest that was proven


def read_proof(folder: Path) -> Proof | None:
    """Return the verdict on a checkpoint; None when there is none on the files that are there now."""
    try:
        proof = msgspec.json.decode((folder / PROOF).read_bytes(), type=Proof)
    except (OSError, ValueError):
        return None
    return proof if proof.manifest == manifest_hash(folder) else None


def write_proof(folder: Path, proof: Proof) -> None:
    """Put a verdict beside the manifest; it is on the disk when this returns. Raises: OSError."""
    replace_file(folder / PROOF, msgspec.json.format(msgspec.json.encode(proof), indent=1))


def is_proven(folder: Path) -> bool:
    proof = read_proof(folder)
    return proof is not None and proof.verdict == "proven"


def manifest_hash(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest; empty when it has none that can be read."""
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""
