"""A start that first fetches the run's newest checkpoint from its copies, when it is newer than the local ones."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from learner.checkpoint.best import best_of
from learner.checkpoint.copier import KEPT_RECORDS, CheckpointCopier
from learner.checkpoint.copy_store import Copy, CopyStore, StoreError, manifest_digest, open_store
from learner.checkpoint.manifest import MANIFEST, CorruptCheckpointError, verify
from learner.disk.run_folder import CHECKPOINTS, SETTINGS
from learner.run.start import RunStart, lock_folder, plan_start
from learner.run.terminal import say
from protocol.disk.files import move_synced, replace_file
from protocol.errors import OperatorError, SettingsError
from protocol.settings.loader import saved_run_name
from protocol.settings.settings import Settings

_ASIDE = ".tmp-fetched-"  # prefix of unfinished copies, which the next checkpoint removes


def start_from_here(settings: Settings, model_digest: str) -> RunStart:
    """Return the start of the run by its folder alone; changes nothing."""
    return plan_start(settings.run, model_digest)


def start_with_copies(settings: Settings, model_digest: str) -> RunStart:
    """Return the start of the run after a newer checkpoint was fetched, if there is one.

    Raises: the errors of `plan_start`; SettingsError for an unusable URL; OperatorError when the run has no local
    checkpoint and the store does not answer or holds another run of its name.
    """
    start = start_from_here(settings, model_digest)
    url = settings.learner.copy_checkpoints_to
    if url is None:
        return start
    store = open_store(url, start.run_id)
    try:
        copies = store.copies()
        if start.checkpoint is None:
            store.check_writable()
        if _fetch_newest(copies, store, start, settings, model_digest):
            found = start_from_here(settings, model_digest)
            # The fetched run may be complete: then the next run's copies are fetched too.
            return found if found.run_id == start.run_id else start_with_copies(settings, model_digest)
    except StoreError as error:
        if start.checkpoint is None:
            raise OperatorError(
                f"{url} (learner.copy_checkpoints_to) cannot be used: {error}. The run {start.run_id} has "
                "no checkpoint here, and may have copies there. Correct the setting, or leave it out."
            ) from None
        unanswered = f"{url} does not answer ({error}): the run resumes without newer checkpoints from there."
        return replace(start, notice=f"{start.notice} {unanswered}" if start.notice else unanswered)
    if copies and (start.checkpoint is None or not start.seen):  # not seen: it starts from another run's checkpoint
        raise OperatorError(
            f"{url} holds checkpoints of a run {start.run_id}, up to step {copies[-1].step}, and this run of that name "
            "is new: both would be mixed there. Choose another run.name or learner.copy_checkpoints_to."
        )
    return start


def copier_of(settings: Settings, start: RunStart) -> CheckpointCopier | None:
    """Return the idle copier of the run's checkpoints; None when they are not copied."""
    url = settings.learner.copy_checkpoints_to
    if url is None:
        return None
    store, keep = open_store(url, start.run_id), settings.learner.keep_checkpoints
    return CheckpointCopier(store, start.folder, keep, best_of(settings.eval))


def _fetch_newest(
    copies: Sequence[Copy], store: CopyStore, start: RunStart, settings: Settings, model_digest: str
) -> bool:
    """Fetch the newest whole copy of this run; return False when none is newer than the local checkpoints.

    copies: ordered by step. Raises: StoreError when copies are newer and none is whole; as `_fetch` does.
    """
    problem = ""
    for copy in reversed(copies):
        if copy.step <= start.step or not _may_resume_from(copy, store, start, settings):
            break
        problem = _fetch(copy, store, start, model_digest)
        if not problem:
            return True
        say(f"{store.url}: {problem}. An older one is tried.")
    if problem:
        raise StoreError(problem)
    return False


def _fetch(copy: Copy, store: CopyStore, start: RunStart, model_digest: str) -> str:
    """Fetch a copy into the run folder, whole or not at all; returns why it is not whole, else an empty text.

    Raises: SettingsError for another model's copy; StoreError; OperatorError for a full disk; as `lock_folder` does.
    """
    if copy.model_digest != model_digest:
        raise SettingsError(
            f"settings: {store.url}/{start.run_id}/{copy.name} is a checkpoint of another model than policy.model. "
            "Give the model it was made from, or another run.name."
        )
    say(f"Fetching the checkpoint of step {copy.step} from {store.url}.")
    root = start.folder / CHECKPOINTS
    aside, target = root / f"{_ASIDE}{copy.step}", root / f"step_{copy.step:06d}"
    with lock_folder(start):
        try:
            root.mkdir(exist_ok=True)
            for leftover in (aside, target):  # a valid `target` would have been the start
                shutil.rmtree(leftover, ignore_errors=True)
            records = store.fetch(copy, aside)
            verify(aside)
            for name in set(KEPT_RECORDS) & records.keys():
                replace_file(start.folder / name, records[name])
            move_synced(aside, target)
        except CorruptCheckpointError as error:
            shutil.rmtree(aside, ignore_errors=True)  # an older one needs the space
            return f"the copy of step {copy.step} is not whole ({error})"
        except OSError as error:
            raise OperatorError(
                f"The checkpoint of step {copy.step} cannot be stored in {root}: {error.strerror}. Set run.dir to a "
                "folder on a disk with room."
            ) from None
    return ""


def _may_resume_from(copy: Copy, store: CopyStore, start: RunStart, settings: Settings) -> bool:
    """Return whether a copy belongs to the run that starts, and the run may resume from it."""
    if settings.run.resume != "auto" or _is_refused_here(copy, start.folder):
        return False
    if start.run_id == settings.run.name or start.checkpoint is not None:
        return True
    # A run after a complete one has a numbered name, which may also be another run's own name.
    return saved_run_name(store.record(copy, SETTINGS)) == settings.run.name


def _is_refused_here(copy: Copy, folder: Path) -> bool:
    """Return whether the run went back before this checkpoint, or refused it, while the store still has it."""
    manifests = (folder / CHECKPOINTS).glob(f"*_step_{copy.step:06d}*/{MANIFEST}")
    return any(manifest_digest(manifest.read_bytes()) == copy.digest for manifest in manifests)
