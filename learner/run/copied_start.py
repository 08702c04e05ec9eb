"""A start that first fetches the run's newest checkpoint from its copy, when it is newer than the local ones."""

import shutil
from dataclasses import replace
from pathlib import Path

from learner.checkpoint.best import best_of
from learner.checkpoint.copier import CheckpointCopier
from learner.checkpoint.folder import name_of
from learner.checkpoint.manifest import CorruptCheckpointError, verify
from learner.checkpoint.run_copy import RunCopy, StoreError
from learner.disk.run_folder import CHECKPOINTS
from learner.run.start import RunStart, lock_folder, plan_start
from learner.run.terminal import say
from protocol.disk.files import move_synced
from protocol.errors import OperatorError
from protocol.settings.evaluation import EvalSettings
from protocol.settings.loader import saved_run_name
from protocol.settings.settings import Settings

_ASIDE = ".tmp-fetched-"  # prefix of unfinished copies, which the next checkpoint removes


def start_with_copies(settings: Settings, model_digest: str) -> RunStart:
    """Return the start of the run after a newer checkpoint was fetched, if there is one.

    Raises: the errors of `plan_start`; SettingsError for an unusable URL; OperatorError when the run has no local
    checkpoint and the store does not answer or holds another run of its name.
    """
    start = plan_start(settings.run, model_digest)
    if settings.learner.copy_checkpoints_to is None:
        return start
    copy = RunCopy(settings.learner.copy_checkpoints_to, start.run_id)
    try:
        steps = copy.steps()
        if start.checkpoint is None:
            copy.check_writable()
        if (
            settings.run.resume == "auto"
            and _is_of_this_run(copy, start, settings)
            and _fetch_newest(copy, start, settings)
        ):
            fetched = plan_start(settings.run, model_digest)
            # The fetched run may be complete: then the next run's checkpoints are fetched too.
            return fetched if fetched.run_id == start.run_id else start_with_copies(settings, model_digest)
    except StoreError as error:
        if start.checkpoint is None:
            raise OperatorError(
                f"{copy.url} (learner.copy_checkpoints_to) cannot be used: {error}. The run {start.run_id} has "
                "no checkpoint here, and may have copies there. Correct the setting, or leave it out."
            ) from None
        unanswered = f"{copy.url} does not answer ({error}): the run resumes without newer checkpoints from there."
        return replace(start, notice=f"{start.notice} {unanswered}" if start.notice else unanswered)
    if steps and (start.checkpoint is None or not start.seen):  # not seen: it starts from another run's checkpoint
        again = "" if settings.run.resume == "auto" else " To continue that run, set run.resume to auto."
        raise OperatorError(
            f"{copy.url} holds checkpoints of a run {start.run_id}, up to step {steps[-1]}, and this run of that name "
            f"is new: both would be mixed there. Choose another run.name or learner.copy_checkpoints_to.{again}"
        )
    return start


def copier_of(settings: Settings, start: RunStart) -> CheckpointCopier | None:
    """Return the idle copier of the run's checkpoints; None when they are not copied."""
    url = settings.learner.copy_checkpoints_to
    if url is None:
        return None
    return CheckpointCopier(RunCopy(url, start.run_id), start.folder, settings.learner.keep_checkpoints)


def _is_of_this_run(copy: RunCopy, start: RunStart, settings: Settings) -> bool:
    """Return whether the copy is of the run that starts.

    A run after a complete one has a numbered name, which may also be another run's own name.
    """
    if start.run_id == settings.run.name or start.checkpoint is not None:
        return True
    return saved_run_name(copy.read_settings()) == settings.run.name


def _fetch_newest(copy: RunCopy, start: RunStart, settings: Settings) -> bool:
    """Fetch the newest whole checkpoint, and the best one; return False when none is newer than the local ones.

    Raises: StoreError when checkpoints are newer and none is whole; OperatorError for a full disk; as `lock_folder`.
    """
    problem = ""
    for step in reversed(copy.steps()):
        if step <= start.step or _is_set_aside(start.folder, step):
            break
        say(f"Fetching the checkpoint of step {step} from {copy.url}.")
        with lock_folder(start):
            try:
                _fetch(copy, step, start.folder)
                _fetch_best(copy, step, start.folder, settings.eval)
            except CorruptCheckpointError as error:
                problem = f"the copy of step {step} is not whole ({error})"
                say(f"{copy.url}: {problem}. An older one is tried.")
            except OSError as error:
                raise OperatorError(
                    f"The checkpoint of step {step} cannot be stored in {start.folder}: {error.strerror}. Set run.dir "
                    "to a folder on a disk with room."
                ) from None
            else:
                return True
    if problem:
        raise StoreError(problem)
    return False


def _fetch_best(copy: RunCopy, newest: int, folder: Path, evals: EvalSettings) -> None:
    """Fetch the best of the checkpoints before the newest one: copies that the run folder lacks are removed."""
    step = best_of([each for each in copy.steps() if each <= newest], folder, evals)
    if step is None or (folder / CHECKPOINTS / name_of(step)).exists():
        return
    say(f"Fetching the best checkpoint, of step {step}, from {copy.url}.")
    try:
        _fetch(copy, step, folder)
    except (CorruptCheckpointError, StoreError) as error:
        say(f"The best checkpoint, of step {step}, is lost: its copy cannot be fetched ({error}).")


def _fetch(copy: RunCopy, step: int, folder: Path) -> None:
    """Fetch a checkpoint into the run folder, whole or not at all."""
    root = folder / CHECKPOINTS
    aside, target = root / f"{_ASIDE}{step}", root / name_of(step)
    root.mkdir(exist_ok=True)
    try:
        shutil.rmtree(target, ignore_errors=True)  # a valid one would have been the start
        copy.fetch(step, aside, folder)
        verify(aside)
        move_synced(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # an older one needs the space


def _is_set_aside(folder: Path, step: int) -> bool:
    """Return whether the run went back before this checkpoint, or refused it, while the store still has it."""
    return any((folder / CHECKPOINTS).glob(f"*_step_{step:06d}*"))
