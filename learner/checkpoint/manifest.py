"""A checkpoint's manifest: the checkpoint's facts, and every file's size and hash, in a form that shows damage.

A folder without a manifest was never finished. Call `verify` before any use of a checkpoint's files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from learner.checkpoint.sealed_files import Report, first_difference, first_wrong_entry, no_report
from protocol.errors import OperatorError

SCHEMA = 2
_OF_0_1_0 = 1  # schema of version 0.1.0
MANIFEST = "MANIFEST.json"


class CorruptCheckpointError(Exception):
    """A checkpoint folder differs from its manifest: nothing in it may be loaded."""


class RefusedCheckpointError(OperatorError):
    """A policy that was loaded has another digest than the checkpoint's manifest: no run resumes from it."""


@dataclass(frozen=True)
class Checkpoint:
    """The facts of a checkpoint. `verify` returns it when every file equals the manifest."""

    path: Path  # current folder
    step: int  # last step inside
    policy_version: int
    run_id: str
    model_digest: str  # digest of the model's shape and tokenizer, not of its weights
    policy_digest: str = ""  # digest of all weights as servers hold them
    policy_form: str = ""  # `PolicyEngine.digest_form` of the ranks that saved: digests of other forms differ


def verify(path: Path, report: Report = no_report, *, reads_content: bool = True) -> Checkpoint:
    """Return the checkpoint in this folder, every file read and compared with the manifest.

    reads_content: False: only names, kinds and sizes are compared, and no file is opened.
    Raises: CorruptCheckpointError naming the first file that is missing, surplus, or of another kind, size or hash.
    """
    manifest = _read_manifest(path)
    compared = path, manifest["files"], (MANIFEST,)
    problem = first_difference(*compared, report) if reads_content else first_wrong_entry(*compared)
    if problem is not None:
        raise CorruptCheckpointError(problem)
    return Checkpoint(path, **{fact.name: manifest[fact.name] for fact in fields(Checkpoint)[1:]})


def manifest_bytes(checkpoint: Checkpoint, files: Mapping[str, object]) -> bytes:
    """Return the manifest of a checkpoint with these files, as `sealed_files.seal_files` lists them."""
    facts = asdict(checkpoint)
    del facts["path"]  # the folder moves
    return _to_json({"schema": SCHEMA, **facts, "files": files})


def _to_json(body: Mapping[str, object]) -> bytes:
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} has no {MANIFEST}") from None
    except OSError as error:
        raise CorruptCheckpointError(f"{path / MANIFEST} cannot be read: {error.strerror}") from None
    return _parse_manifest(path, content)


def _parse_manifest(path: Path, content: bytes) -> dict[str, Any]:
    """Return an intact manifest. Raises: CorruptCheckpointError; OperatorError for one of version 0.1.0."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise CorruptCheckpointError(f"{path / MANIFEST} is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("schema") not in (_OF_0_1_0, SCHEMA):
        raise CorruptCheckpointError(f"{path / MANIFEST} is not of schema {SCHEMA}")
    digest = manifest.pop("sha256", None)
    if digest != _digest(manifest):
        raise CorruptCheckpointError(f"{path / MANIFEST} does not match its own hash")
    if content != _to_json(manifest):  # a flipped bit can turn one white space into another
        raise CorruptCheckpointError(f"{path / MANIFEST} was changed after it was written")
    if manifest["schema"] == _OF_0_1_0:
        raise OperatorError(
            f"{path} is a checkpoint of Sluice 0.1.0. Resume it with 0.1.0, or choose another run.name."
        )
    return manifest
