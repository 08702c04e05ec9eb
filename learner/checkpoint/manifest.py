"""A checkpoint's manifest: what the checkpoint is of, and every file's size and hash, in a form that shows damage.

It is the last file that a folder gets: a folder without it was never finished. `verify` comes before any use of a
checkpoint's files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learner.checkpoint.sealed_files import Tell, first_difference, first_wrong_entry, quiet
from protocol.errors import OperatorError

SCHEMA = 2
_READABLE = (1, SCHEMA)  # 1: of the version before digests were kept in the manifest
MANIFEST = "MANIFEST.json"
_VERDICT = "PROOF.json"  # of schema 1, written after the manifest
_UNLISTED = (MANIFEST, _VERDICT, f".{_VERDICT}")


class CorruptCheckpointError(Exception):
    """A checkpoint folder is not what its manifest says: nothing in it may be loaded."""


class RefusedCheckpointError(OperatorError):
    """A policy that was loaded has another digest than the checkpoint's manifest: no run resumes from it."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint is of. Of one that `verify` returned, every file is as the manifest says."""

    path: Path  # the folder, as it is named now
    step: int  # the last step in it
    policy_version: int  # of its weights
    run_id: str  # the run that wrote it
    model_digest: str  # of the model's shape and tokenizer, not of its weights
    policy_digest: str = ""  # of all weights as servers hold them; empty: of schema 1
    policy_form: str = ""  # `PolicyEngine.digest_form` of the ranks that saved: digests of other forms differ


def verify(path: Path, tell: Tell = quiet) -> Checkpoint:
    """Return the checkpoint in this folder, every file read and compared with the manifest.

    Raises: CorruptCheckpointError naming the first file that is missing, surplus, or of another size or hash.
    """
    manifest = _read_manifest(path)
    problem = first_difference(path, manifest["files"], unlisted=_UNLISTED, tell=tell)
    if problem is not None:
        raise CorruptCheckpointError(problem)
    return _checkpoint(path, manifest)


def look_at(path: Path) -> Checkpoint:
    """Return the checkpoint in this folder by its manifest and its files' names, kinds and sizes: no content is read.

    Raises: CorruptCheckpointError naming the first file that is missing, surplus, or of another kind or size.
    """
    manifest = _read_manifest(path)
    problem = first_wrong_entry(path, manifest["files"], unlisted=_UNLISTED)
    if problem is not None:
        raise CorruptCheckpointError(problem)
    return _checkpoint(path, manifest)


def read_checkpoint(path: Path, content: bytes) -> Checkpoint:
    """Return what a manifest with this content tells of the checkpoint `path`, of which nothing else is looked at.

    Raises: CorruptCheckpointError for one that is no manifest, or not as it was written.
    """
    return _checkpoint(path, _parse_manifest(path, content))


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
        raise CorruptCheckpointError(f"{path / MANIFEST} is no JSON") from None
    if not isinstance(manifest, dict) or manifest.get("schema") not in _READABLE:
        raise CorruptCheckpointError(f"{path / MANIFEST} is not of schema {' or '.join(map(str, _READABLE))}")
    digest = manifest.pop("sha256", None)
    if digest != _digest(manifest):
        raise CorruptCheckpointError(f"{path / MANIFEST} does not have the hash that it says")
    if content != _to_json(manifest):  # a flipped bit can turn one white space into another
        raise CorruptCheckpointError(f"{path / MANIFEST} is not as it was written")
    return manifest
