"""Checkpoint folders that are whole or not there: written aside, hashed, fsynced, renamed; verified before any use.

Called by `learner.rank_checkpoint` (`begin` and `commit` on rank 0, with all ranks writing in between), by
`learner.run_folder` and `learner.audit` (`newest_valid`, `open_checkpoint`). Layout under a run's checkpoints/:

    step_000100/...            the ranks' files and the ledger's copy
    step_000100/MANIFEST.json  written last: schema, step, version, run, model, and every file's size and SHA-256
    latest -> step_000100
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from protocol.errors import OperatorError, SettingsError

SCHEMA = 1
MANIFEST = "MANIFEST.json"
LATEST = "latest"
_ASIDE = ".tmp-"


class CorruptCheckpointError(Exception):
    """A checkpoint folder is not what its manifest says: nothing in it may be loaded."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint is of. model_digest: of the model's shape and tokenizer, not of its weights.

    Those that `verify` returns hold only files of the size and hash that the manifest says.
    """

    path: Path
    step: int
    policy_version: int
    run_id: str
    model_digest: str


def aside_folder(root: Path, step: int) -> Path:
    """Return where step's checkpoint is written before it is committed; `begin` makes the folder."""
    return root / f"{_ASIDE}{_name(step)}"


def begin(root: Path, step: int) -> Path:
    """Return a new folder aside for all ranks to write into; what earlier lives left aside is removed.

    Raises: OperatorError when the folder cannot be written.
    """
    aside = aside_folder(root, step)
    with _written(root):
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{_ASIDE}*"):
            shutil.rmtree(leftover)
        aside.mkdir()
    return aside


def commit(aside: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Return the finished checkpoint: `aside`, hashed and renamed. Called on rank 0 when every rank has written.

    Older checkpoints are untouched until this one has been read back and verified. Blocks for a read of all its bytes.
    Raises: OperatorError when the disk refuses; the aside folder is then gone and older checkpoints are intact.
    """
    root = aside.parent
    target = root / _name(checkpoint.step)
    with _written(root, aside):
        files = {str(PurePosixPath(path.relative_to(aside))): _sealed(path) for path in _files(aside)}
        body = {"schema": SCHEMA, **_facts(checkpoint), "files": files}
        _write_synced(aside / MANIFEST, json.dumps({**body, "sha256": _digest(body)}, indent=1).encode())
        for folder in sorted({path.parent for path in _files(aside)}):
            _sync_folder(folder)
        _displace(target)
        aside.rename(target)
        _sync_folder(root)
    committed = verify(target)
    with _written(root):
        _point_latest(root, target)
        for displaced in root.glob(f"{_ASIDE}*"):
            shutil.rmtree(displaced)
    return committed


def abandon(aside: Path) -> None:
    """Remove a folder that `begin` made and that will not be committed."""
    shutil.rmtree(aside, ignore_errors=True)


def verify(path: Path) -> Checkpoint:
    """Return the checkpoint in this folder, every file read and compared with the manifest.

    Raises: CorruptCheckpointError naming the first file that is missing, surplus, or of another size or hash.
    """
    manifest = _read_manifest(path)
    listed: Mapping[str, Mapping[str, object]] = manifest["files"]
    present = {str(PurePosixPath(file.relative_to(path))): file for file in _files(path)}
    present.pop(MANIFEST, None)
    for name in sorted(listed.keys() ^ present.keys()):
        problem = "is missing" if name in listed else "is not in the manifest"
        raise CorruptCheckpointError(f"{path / name} {problem}")
    for name, file in present.items():
        if file.is_symlink():
            raise CorruptCheckpointError(f"{file} is a link: what it points at can change")
        try:
            found = {"bytes": file.lstat().st_size, "sha256": _hash(file)}
        except OSError as error:
            raise CorruptCheckpointError(f"{file} cannot be read: {error.strerror}") from None
        if found != listed[name]:
            raise CorruptCheckpointError(f"{file} is not what the manifest says: {found}, expected {listed[name]}")
    return Checkpoint(
        step=manifest["step"],
        policy_version=manifest["policy_version"],
        run_id=manifest["run_id"],
        model_digest=manifest["model_digest"],
        path=path,
    )


def newest_valid(root: Path) -> Checkpoint | None:
    """Return the valid checkpoint of the highest step, None when there is none. Corrupt ones are passed over."""
    for path in _newest_first(root):
        try:
            return verify(path)
        except CorruptCheckpointError:
            continue
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint that the operator named. Raises: SettingsError when there is no valid one."""
    try:
        return verify(path.resolve())
    except CorruptCheckpointError as error:
        raise SettingsError(
            f"settings: run.resume = {path} is no valid checkpoint ({error}). "
            "Name a folder such as runs/NAME/checkpoints/step_000100, or use auto."
        ) from None


def rotate(root: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` newest valid checkpoints; returns the removed ones.

    Corrupt folders newer than the oldest kept one stay, for whoever looks into what broke them.
    Raises: OperatorError when a folder cannot be removed.
    """
    kept: list[Path] = []
    removed: list[Path] = []
    for path in _newest_first(root):
        if len(kept) >= keep:
            with _written(root):
                shutil.rmtree(path)
            removed.append(path)
        elif _is_valid(path):
            kept.append(path)
    return removed


def _is_valid(path: Path) -> bool:
    try:
        verify(path)
    except CorruptCheckpointError:
        return False
    return True


def _facts(checkpoint: Checkpoint) -> dict[str, object]:
    facts = asdict(checkpoint)
    del facts["path"]  # the folder moves
    return facts


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _newest_first(root: Path) -> list[Path]:
    steps = {path: path.name.removeprefix("step_") for path in root.glob("step_*")}
    return sorted((path for path, step in steps.items() if step.isdigit()), key=lambda p: -int(steps[p]))


def _files(folder: Path) -> Iterator[Path]:
    """Yield everything in the folder that is not a folder. A link to a folder counts as a file, and is refused."""
    for base, folders, names in os.walk(folder):
        for name in sorted([*names, *(f for f in folders if (Path(base) / f).is_symlink())]):
            yield Path(base) / name


def _sealed(path: Path) -> dict[str, object]:
    """Return size and hash of a file after its bytes have reached the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": _hash(path)}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} has no {MANIFEST}") from None
    except OSError as error:
        raise CorruptCheckpointError(f"{path / MANIFEST} cannot be read: {error.strerror}") from None
    except ValueError:
        raise CorruptCheckpointError(f"{path / MANIFEST} is no JSON") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise CorruptCheckpointError(f"{path / MANIFEST} is not of schema {SCHEMA}")
    digest = manifest.pop("sha256", None)
    if digest != _digest(manifest):
        raise CorruptCheckpointError(f"{path / MANIFEST} does not have the hash that it says")
    return manifest


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _displace(target: Path) -> None:
    """Move a folder of the same step out of the way: it is corrupt, or of a life that was resumed before it."""
    if target.exists():
        target.rename(target.with_name(f"{_ASIDE}displaced-{target.name}"))


def _point_latest(root: Path, target: Path) -> None:
    aside = root / f".{LATEST}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(target.name)
    aside.replace(root / LATEST)
    _sync_folder(root)


@contextmanager
def _written(root: Path, aside: Path | None = None) -> Iterator[None]:
    """Turn the disk's refusal into a sentence, and free what was written aside."""
    try:
        yield
    except OSError as error:
        if aside is not None:
            abandon(aside)
        raise OperatorError(
            f"The checkpoint folder {root} cannot be written: {error.strerror or error}. "
            "Free the disk or set run.dir to a folder on another one; older checkpoints are intact."
        ) from None
