"""Checkpoint folders that are whole or absent: written aside, hashed, fsynced, renamed; verified before any use.

Layout under a run's checkpoints/:

    step_000100/...            the ranks' files and the ledger's copy
    step_000100/MANIFEST.json  written last: schema, step, version, run, model, and every file's size and SHA-256
    latest -> step_000100
    .tmp-...                   being written or removed; the next `begin` removes leftovers of a crash
    set_aside_step_000120      newer than the checkpoint of a resume: corrupt, refused, or of dropped steps

A folder has its `step_` name only while it is whole. A crash at any point leaves the older checkpoints unchanged, and
`latest` at a whole one, or absent when there is none.
"""

import os
import shutil
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from learner.checkpoint.manifest import MANIFEST, Checkpoint, CorruptCheckpointError, manifest_bytes, verify
from learner.checkpoint.sealed_files import Report, no_report, seal_files
from protocol.disk.files import move_synced, sync
from protocol.errors import OperatorError, SettingsError
from protocol.failpoints import failpoint

LATEST = "latest"
_STEP = "step_"
_ASIDE = ".tmp-"
_SET_ASIDE = "set_aside_"


def aside_folder(root: Path, step: int) -> Path:
    """Return the folder in which step's checkpoint is written; `begin` makes it."""
    return root / f"{_ASIDE}{name_of(step)}"


def begin(root: Path, step: int) -> Path:
    """Return a new folder for all ranks to write into, after removing leftovers of earlier starts.

    Raises: OperatorError when the folder cannot be written.
    """
    failpoint("checkpoint.begin.before")
    aside = aside_folder(root, step)
    with _naming_disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        failpoint("checkpoint.begin.leftovers_removed")
        aside.mkdir()
    failpoint("checkpoint.begin.made")
    return aside


def seal(aside: Path, checkpoint: Checkpoint, report: Report = no_report) -> None:
    """Hash every file and write the manifest; all bytes are on the disk then. Call on rank 0 when all have written.

    Blocks for one read of all bytes.
    Raises: OperatorError when the disk refuses; the aside folder is then removed.
    """
    failpoint("checkpoint.commit.begun")
    with _naming_disk_errors(aside.parent, aside):
        files = seal_files(aside, report)
        failpoint("checkpoint.commit.files_sealed")
        (aside / MANIFEST).write_bytes(manifest_bytes(checkpoint, files))
        failpoint("checkpoint.commit.manifest_written")
        sync(aside / MANIFEST)
        failpoint("checkpoint.commit.manifest_synced")
        for base, _, _ in os.walk(aside):
            sync(Path(base))
        failpoint("checkpoint.commit.folders_synced")


def publish(aside: Path, step: int, report: Report = no_report) -> Checkpoint:
    """Return the finished checkpoint: `aside`, sealed, renamed, verified, and named by `latest`. Call on rank 0.

    Older checkpoints are untouched until this one is verified. Blocks for one read of all bytes. Raises: as `seal`.
    """
    root = aside.parent
    target = root / name_of(step)
    with _naming_disk_errors(root, aside):
        _displace(target)
        aside.rename(target)
        failpoint("checkpoint.commit.renamed")
        sync(root)
        failpoint("checkpoint.commit.root_synced")
    committed = verify(target, report)
    failpoint("checkpoint.commit.verified")
    with _naming_disk_errors(root):
        point_latest(root, target)
        _remove_leftovers(root)
    failpoint("checkpoint.commit.displaced_removed")
    return committed


def newest_valid(root: Path, highest_step: int | None = None) -> Checkpoint | None:
    """Return the valid checkpoint of the highest step, or None. Corrupt ones are skipped.

    highest_step: higher steps are skipped too. A folder whose manifest has another step than its name is corrupt.
    """
    for path in _newest_first(root):
        if highest_step is not None and step_of(path) > highest_step:
            continue
        try:
            checkpoint = verify(path)
        except CorruptCheckpointError:
            continue
        if checkpoint.step == step_of(path):
            return checkpoint
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint that run.resume names. Raises: SettingsError when it is not valid."""
    try:
        return verify(path.resolve())
    except CorruptCheckpointError as error:
        raise SettingsError(
            f"settings: run.resume = {path} is not a valid checkpoint ({error}). "
            "Name a folder such as runs/NAME/checkpoints/step_000100, or use auto."
        ) from None


def rotate(root: Path, keep: int, verified: Container[Path] = (), protected: Container[int] = ()) -> list[Path]:
    """Remove all but the `keep` newest valid checkpoints; returns the removed ones. Call it after `publish`.

    verified: folders that this process verified before; only their names, kinds and sizes are compared again.
    protected: further steps to keep. Corrupt folders newer than the oldest kept one stay for inspection.
    Raises: OperatorError when a folder cannot be removed.
    """
    kept: list[Path] = []
    removed: list[Path] = []
    for path in _newest_first(root):
        if len(kept) >= keep and step_of(path) not in protected:
            with _naming_disk_errors(root):
                remove(path)
            removed.append(path)
        elif len(kept) < keep and _is_valid(path, is_known=path in verified):
            kept.append(path)
    return removed


def newer_than(root: Path, step: int) -> list[Path]:
    """Return the folders of steps above `step`, valid or not, newest first."""
    return [path for path in _newest_first(root) if step_of(path) > step]


def set_aside_newer(root: Path, step: int) -> None:
    """Rename the folders of steps above `step`. They are corrupt, refused or of dropped steps.

    The next start of a run that resumes from `step` would choose them. `latest` leaves each before it moves.
    Raises: OSError.
    """
    for path in newer_than(root, step):
        set_aside(root, path, step)


def set_aside(root: Path, path: Path, highest_step: int) -> Path:
    """Rename a checkpoint's folder so that no start chooses it; returns the new path. Raises: OSError.

    `latest` names another one of at most highest_step before the folder moves.
    """
    _repoint_latest(root, path, highest_step)
    return _move_aside(path)


def make_room(link: Path) -> None:
    """Set aside a folder in a link's place: a program that follows links, such as scp, copied the run's folder.

    Raises: OSError.
    """
    if link.is_dir() and not link.is_symlink():
        _move_aside(link)


def point_latest(root: Path, target: Path) -> None:
    """Point `latest` at this checkpoint of the folder. Raises: OSError; `latest` is then unchanged."""
    aside = root / f".{LATEST}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(target.name)
    make_room(root / LATEST)
    failpoint("checkpoint.latest.linked_aside")
    aside.replace(root / LATEST)
    failpoint("checkpoint.latest.replaced")
    sync(root)
    failpoint("checkpoint.latest.synced")


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix(_STEP))


def _is_valid(path: Path, is_known: bool) -> bool:
    try:
        verify(path, reads_content=not is_known)
    except CorruptCheckpointError:
        return False
    return True


def name_of(step: int) -> str:
    return f"{_STEP}{step:06d}"


def _newest_first(root: Path) -> list[Path]:
    numbers = {path: path.name.removeprefix(_STEP) for path in root.glob(f"{_STEP}*")}
    return sorted((path for path, n in numbers.items() if n.isascii() and n.isdecimal()), key=step_of, reverse=True)


def _displace(target: Path) -> None:
    """Rename a folder of the same step; `latest` leaves it first."""
    if target.exists():
        _repoint_latest(target.parent, target, step_of(target) - 1)
        failpoint("checkpoint.commit.latest_taken_off")
        target.rename(target.with_name(f"{_ASIDE}displaced-{target.name}"))
        failpoint("checkpoint.commit.displaced")


def _repoint_latest(root: Path, path: Path, highest_step: int) -> None:
    """If `latest` names `path`, point it at a valid checkpoint of at most this step, or remove it."""
    latest = root / LATEST
    if not latest.is_symlink() or latest.readlink().name != path.name:
        return
    other = newest_valid(root, highest_step)
    if other is not None:
        point_latest(root, other.path)
    else:
        latest.unlink()
        sync(root)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no start finds half of it."""
    failpoint("checkpoint.rotate.before_removal")
    aside = path.with_name(f"{_ASIDE}removed-{path.name}")
    move_synced(path, aside)
    failpoint("checkpoint.rotate.renamed")
    shutil.rmtree(aside)
    failpoint("checkpoint.rotate.after_removal")


def _move_aside(path: Path) -> Path:
    number, target = 1, path.with_name(f"{_SET_ASIDE}{path.name}")
    while target.exists():
        number += 1
        target = path.with_name(f"{_SET_ASIDE}{path.name}-{number}")
    move_synced(path, target)
    return target


def _remove_leftovers(root: Path) -> None:
    for leftover in root.glob(f"{_ASIDE}*"):
        shutil.rmtree(leftover)


@contextmanager
def _naming_disk_errors(root: Path, aside: Path | None = None) -> Iterator[None]:
    """Turn errors of the disk into a sentence, and remove the folder `aside`."""
    try:
        yield
    except OSError as error:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        raise OperatorError(
            f"The checkpoint folder {root} cannot be written: {error.strerror or error}. "
            "Free the disk or set run.dir to a folder on another one; older checkpoints are intact."
        ) from None
