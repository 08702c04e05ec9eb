"""The run folder: the checkpoint that a run starts from, the lock, and the files that a start resets.

Layout: settings.yaml, metrics.jsonl, ledger.sqlite, checkpoints/step_000100/, logs/, report.html.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from learner.checkpoint.folder import newer_than, newest_valid, open_checkpoint, point_latest, set_aside_newer
from learner.checkpoint.manifest import Checkpoint
from learner.disk.run_folder import (
    CHECKPOINTS,
    INSTALLATION,
    LEDGER,
    LOCK,
    LOGS,
    MODELS,
    RECORDS,
    SEARCH_INDEX,
    SETTINGS,
    WANDB_ID,
)
from protocol.disk.files import aside_of, copy_synced, move_synced, replace_file, sync
from protocol.disk.lock import file_lock
from protocol.errors import OperatorError, SettingsError
from protocol.failpoints import failpoint
from protocol.node.identity import installation
from protocol.settings.loader import load_saved_settings, save_settings, saved_run_name
from protocol.settings.run import RunSettings
from protocol.settings.settings import Settings


@dataclass(frozen=True)
class RunStart:
    """The folder and the checkpoint of a start."""

    folder: Path  # run folder; its name is the run's name
    checkpoint: Checkpoint | None  # checkpoint to resume from; None: the run is new
    notice: str | None = None  # message for the user
    seen: tuple[str, ...] = ()  # names of the ledger and checkpoints in the folder at that time

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.folder.name

    @property
    def step(self) -> int:
        """The last step of the checkpoint, 0 without one."""
        return self.checkpoint.step if self.checkpoint else 0


def plan_start(run: RunSettings, model_digest: str) -> RunStart:
    """Return the start of the run; changes nothing.

    auto: the newest valid checkpoint of this name. When that run is complete, a new run under the next free name, which
    the same command resumes until it is complete. A path: that checkpoint, until this command has saved one.
    Raises: SettingsError for a checkpoint of another model, a path without a valid checkpoint, or resume=never on a
    folder that holds a run.
    """
    folder = Path(run.dir) / run.name
    seen = _accounts_of(folder)
    start = _choose(folder, run, model_digest)
    return replace(start, seen=seen if start.folder == folder else _accounts_of(start.folder))


def _choose(folder: Path, run: RunSettings, model_digest: str) -> RunStart:
    if run.resume not in ("auto", "never"):
        return _choose_named(folder, run, model_digest)
    checkpoint = newest_valid(folder / CHECKPOINTS)
    if checkpoint is None and not (folder / LEDGER).exists():
        return RunStart(folder, None)
    if run.resume == "never":
        raise SettingsError(
            f"settings: run.resume = never, and {folder} holds a run already. "
            "Choose another run.name, or resume with auto."
        )
    if checkpoint is not None and checkpoint.step >= run.max_steps:
        return _start_after(folder, checkpoint.step, run, model_digest)
    return _resume(folder, checkpoint and _of_model(checkpoint, model_digest))


def _choose_named(folder: Path, run: RunSettings, model_digest: str) -> RunStart:
    """Return the start of a command with a checkpoint's path."""
    path = Path(run.resume).resolve()
    has_begun = _began_from(folder, path)
    own = newest_valid(folder / CHECKPOINTS) if has_begun else None
    # The run that made the named checkpoint may have removed it since, as older ones are.
    if own is None or path.exists() or own.path.name < path.name:
        named = _of_model(open_checkpoint(Path(run.resume)), model_digest)
        if not (has_begun or _is_of(folder, named)) and _is_used(folder):
            raise SettingsError(
                f"settings: run.resume = {run.resume} is not a checkpoint of {folder}, which holds a run already: "
                "their records would be mixed. Choose another run.name."
            )
        if own is None or (_is_of(folder, named) and own.step <= named.step):
            if named.step >= run.max_steps:
                raise SettingsError(
                    f"settings: run.resume = {run.resume} is of step {named.step}, and run.max_steps is "
                    f"{run.max_steps}: no step is left. Raise run.max_steps, or begin with its weights: set "
                    f"policy.model to {named.path / 'model'}, without run.resume."
                )
            return RunStart(folder, named, f"Resuming from {named.path}.{_set_aside_notice(folder, named)}")
    if own.step >= run.max_steps:
        raise SettingsError(f"settings: {folder} is complete at step {own.step}. Choose another run.name.")
    start = _resume(folder, _of_model(own, model_digest))
    back = "; remove newer ones to go back" if path.exists() else ", which has been removed"
    return replace(start, notice=f"{start.notice} The last start began at run.resume{back}.")


def _start_after(complete: Path, last_step: int, run: RunSettings, model_digest: str) -> RunStart:
    """Return the start of a command whose run is complete: the newest run that it began since, or a new run."""
    text = f"{complete} is complete at step {last_step}"
    begun = _newest_begun(complete, run.name)
    checkpoint = newest_valid(begun / CHECKPOINTS) if begun is not None else None
    is_over = checkpoint is not None and (checkpoint.step >= run.max_steps or checkpoint.model_digest != model_digest)
    if begun is None or is_over:
        free = _next_free(complete)
        return RunStart(free, None, f"{text}: this is a new run, {free.name}.")
    start = _resume(begun, checkpoint)
    return replace(start, notice=f"{text}. {start.notice}")


def _resume(folder: Path, checkpoint: Checkpoint | None) -> RunStart:
    if checkpoint is None:
        return RunStart(folder, None, f"{folder} holds a run without a valid checkpoint: it starts again from step 0.")
    aside = _set_aside_notice(folder, checkpoint)
    return RunStart(folder, checkpoint, f"Resuming {folder} from step {checkpoint.step}.{aside}")


def plan_restart(start: RunStart) -> RunStart:
    """Return the start after a crash: the newest valid checkpoint of the run, or `start` again."""
    return RunStart(start.folder, newest_valid(start.folder / CHECKPOINTS) or start.checkpoint)


def set_refused_aside(start: RunStart, error: Exception) -> None:
    """Rename the checkpoint that the ranks refused, so that the next attempt uses an older one.

    Raises: the error when the checkpoint is not one of this run's folder: the operator named it.
    """
    assert start.checkpoint is not None
    if not _is_of(start.folder, start.checkpoint):
        raise error
    set_aside_newer(start.folder / CHECKPOINTS, start.step - 1)


@contextlib.contextmanager
def lock_folder(start: RunStart) -> Iterator[None]:
    """Lock the run folder against other commands within the block; the lock ends with the process at the latest.

    Raises: OperatorError when another command has the lock, or trained there after this start was planned; when the
    folder cannot be written.
    """
    folder = start.folder
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(folder / LOCK))
        except BlockingIOError:
            raise OperatorError(
                f"Another command is running in {folder}. Wait for its end, or choose another run.name."
            ) from None
        except OSError as error:
            raise _unwritable(folder, error) from None
        # A run that ended since then left a checkpoint, which this start would overwrite.
        if _accounts_of(folder) != start.seen:
            raise OperatorError(
                f"Another command trained in {folder} while this one made its checks. Give this command again: it "
                "resumes from that command's result."
            )
        yield


def prepare_folder(start: RunStart, settings: Settings) -> None:
    """Prepare the folder: without accounts of an earlier start, or with the ledger of the checkpoint to resume from.

    Raises: OperatorError when it cannot be written; a new folder is removed then.
    """
    folder = start.folder
    is_new = not folder.exists()
    failpoint("run_folder.begun")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        sync(folder.parent)
        if start.checkpoint is not None:
            _go_back_to(start.checkpoint, folder)
        else:
            _set_aside_accounts(folder)
        failpoint("run_folder.before_settings")
        save_settings(settings, folder / SETTINGS)
        replace_file(folder / INSTALLATION, json.dumps(installation(), indent=1).encode())
        failpoint("run_folder.after_settings")
    except OSError as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise _unwritable(folder, error) from None


def _accounts_of(folder: Path) -> tuple[str, ...]:
    """Return the names of the ledger and the checkpoints in a run folder."""
    ledger = [LEDGER] if (folder / LEDGER).exists() else []
    return (*ledger, *(path.name for path in newer_than(folder / CHECKPOINTS, -1)))


def _is_of(folder: Path, checkpoint: Checkpoint) -> bool:
    return checkpoint.path.parent.resolve() == (folder / CHECKPOINTS).resolve()


def _is_used(folder: Path) -> bool:
    """Return whether the folder has checkpoints or lines of a run."""
    return bool(newer_than(folder / CHECKPOINTS, -1)) or any((folder / name).exists() for name in RECORDS)


def _began_from(folder: Path, path: Path) -> bool:
    """Return whether the command of the folder's last start named this checkpoint."""
    try:
        return Path(load_saved_settings(folder / SETTINGS).run.resume).resolve() == path
    except SettingsError:
        return False


def _set_aside_notice(folder: Path, checkpoint: Checkpoint) -> str:
    newer = [path.name for path in newer_than(folder / CHECKPOINTS, checkpoint.step)]
    return f" Set aside, because corrupt or of repeated steps: {', '.join(newer)}." if newer else ""


def _of_model(checkpoint: Checkpoint, digest: str) -> Checkpoint:
    if checkpoint.model_digest != digest:
        raise SettingsError(
            f"settings: {checkpoint.path} is a checkpoint of another model than policy.model. "
            "Give the model it was made from, another run.name, or run.resume never."
        )
    return checkpoint


def _go_back_to(checkpoint: Checkpoint, folder: Path) -> None:
    """Reset the folder's accounts to the checkpoint.

    After a crash in between the next start repeats this: it reads the checkpoints alone, which are intact.
    """
    root = folder / CHECKPOINTS
    if _is_of(folder, checkpoint):
        point_latest(root, checkpoint.path)
    set_aside_newer(root, checkpoint.step)
    failpoint("run_folder.newer_set_aside")
    ledger = folder / LEDGER
    copy_synced(checkpoint.path / LEDGER, aside_of(ledger))
    failpoint("run_folder.ledger_copied_aside")
    # The log is removed, durably, before the new ledger arrives. In the other order a crash would leave the new ledger
    # next to the old log, and SQLite would write the log's pages into it.
    for name in LOGS:
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    failpoint("run_folder.old_log_removed")
    move_synced(aside_of(ledger), ledger)
    failpoint("run_folder.ledger_replaced")
    for name in RECORDS:
        _cut_back(folder / name, checkpoint.step if _is_of(folder, checkpoint) else -1)
        failpoint("run_folder.record_cut")
    for name in (SEARCH_INDEX, MODELS):
        earlier = checkpoint.path.parent.parent / name
        if earlier.exists() and not (folder / name).exists():
            copy_synced(earlier, folder / name)
    page = folder / WANDB_ID
    if checkpoint.run_id == folder.name:
        if (checkpoint.path / WANDB_ID).exists() and not page.exists():
            copy_synced(checkpoint.path / WANDB_ID, page)
    elif _is_of(folder, checkpoint):  # a copied or renamed folder: the page is the earlier name's
        page.unlink(missing_ok=True)


def _set_aside_accounts(folder: Path) -> None:
    """Move away the accounts of a run that crashed before its first checkpoint: its weights no longer exist.

    The ledger is moved last: while it exists, the next start repeats the move. Its log gets a matching name, so that
    SQLite still opens them together.
    """
    before = f"before_{int((folder / LEDGER).stat().st_mtime if (folder / LEDGER).exists() else time.time())}_"
    for name in (*RECORDS, *LOGS, LEDGER):
        if (folder / name).exists():
            move_synced(folder / name, folder / "logs" / f"{before}{name}")
            failpoint("run_folder.record_set_aside")


def _cut_back(record: Path, step: int) -> None:
    """Keep a record's lines up to this step: later lines are about weights that no longer exist."""
    if not record.exists():
        return
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    replace_file(record, "".join(kept).encode())


def _newest_begun(complete: Path, name: str) -> Path | None:
    """Return the newest numbered folder that a command with this run.name made; None without any.

    Other numbered folders are runs of their own name, such as a run named a-2.
    """
    last = int(_next_free(complete).name.rpartition("-")[2])
    folders = (complete.with_name(f"{complete.name}-{number}") for number in reversed(range(2, last)))
    return next((folder for folder in folders if _given_name(folder) == name), None)


def _given_name(folder: Path) -> str | None:
    """Return the run.name of the command that made a run folder; None when it is unknown."""
    try:
        return saved_run_name((folder / SETTINGS).read_bytes())
    except OSError:
        return None


def _next_free(folder: Path) -> Path:
    number = 2
    while (free := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return free


def _unwritable(folder: Path, error: OSError) -> OperatorError:
    return OperatorError(
        f"The run folder {folder} cannot be written: {error.strerror}. Set run.dir to a folder on a disk with room."
    )
