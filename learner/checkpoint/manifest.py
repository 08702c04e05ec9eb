"""A checkpoint's manifest: the checkpoint's facts, and every file's size and hash, in a form that shows damage.

A folder without a manifest was never finished. Call `verify` before any use of a checkpoint's files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learner.checkpoint.sealed_files import Report, first_difference, first_wrong_entry, no_report
from protocol.errors import OperatorError

SCHEMA = 2
_READABLE = (1, SCHEMA)  # 1: of versions that kept no digest in the manifest
MANIFEST = "MANIFEST.json"
_VERDICT = "PROOF.json"  # of schema 1, written after the manifest
_UNLISTED = (MANIFEST, _VERDICT, f".{_VERDICT}")


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
    policy_digest: str = ""  # digest of all weights as servers hold them; empty: schema 1
    policy_form: str = ""  # `PolicyEngine.digest_form` of the ranks that saved: digests of other forms differ


def verify(path: Path, report: Report = no_report) -> Checkpoint:
    """Return the checkpoint in this folder, every file read and compared with the manifest.

    Raises: CorruptCheckpointError naming the first file that is missing, surplus, or of another size or hash.
    """
    manifest = _read_manifest(path)
    problem = first_difference(path, manifest["files"], unlisted=_UNLISTED, report=report)
    if problem is not None:
        raise CorruptCheckpointError(problem)
    return _checkpoint(path, manifest)


def look_at(path: Path) -> Checkpoint:
    """Return the checkpoint in this folder after comparing its files' names, kinds and sizes: no content is read.

    Raises: CorruptCheckpointError naming the first file that is missing, surplus, or of another kind or size.
    """
    manifest = _read_manifest(path)
    problem = first_wrong_entry(path, manifest["files"], unlisted=_UNLISTED)
    if problem is not None:
        raise CorruptCheckpointError(problem)
    return _checkpoint(path, manifest)


def manifest_bytes(checkpoint: Checkpoint, files: Mapping[str, object]) -> bytes:
    """Return the manifest of a checkpoint with these files, as `sealed_files.seal_files` lists them."""
    return _to_json({"schema": SCHEMA, **_facts(checkpoint), "files": files})


def _checkpoint(path: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(
        step=manifest["step"],
        policy_version=manifest["policy_version"],
        run_id=manifest["run_id"],
        model_digest=manifest["model_digest"],
        path=path,
        policy_digest=manifest.get("policy_digest", ""),
        policy_form=manifest.get("policy_form", ""),
    )


def _facts(checkpoint: Checkpoint) -> dict[str, object]:
    facts = asdict(checkpoint)
    del facts["path"]  # the folder moves
    return facts


def _to_json(body: Mapping[str, object]) -> bytes:
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = (path / MANIFEST).read_bytes()
        is_refused = (path / _VERDICT).exists() and b'"refused"' in (path / _VERDICT).read_bytes()
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} has no {MANIFEST}") from None
    except OSError as error:
        raise CorruptCheckpointError(f"{path / MANIFEST} cannot be read: {error.strerror}") from None
    if is_refused:
        raise CorruptCheckpointError(f"{path} failed its verification when it was saved")
    return _parse_manifest(path, content)


def _parse_manifest(path: Path, content: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise CorruptCheckpointError(f"{path / MANIFEST} is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("schema") not in _READABLE:
        raise CorruptCheckpointError(f"{path / MANIFEST} is not of schema {' or '.join(map(str, _READABLE))}")
    digest = manifest.pop("sha256", None)
    if digest != _digest(manifest):
        raise CorruptCheckpointError(f"{path / MANIFEST} does not match its own hash")
    if content != _to_json(manifest):  # a flipped bit can turn one white space into another
        raise CorruptCheckpointError(f"{path / MANIFEST} was changed after it was written")
    return manifest
