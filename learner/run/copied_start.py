"""A start that looks for the run's newest checkpoint among its copies too, and brings it here when it is newer."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from learner.checkpoint.best import best_of
from learner.checkpoint.copies.copier import KEPT_RECORDS, CheckpointCopier
from learner.checkpoint.copies.store import Copy, CopyStore, StoreError, manifest_digest, open_store
from learner.checkpoint.manifest import MANIFEST, CorruptCheckpointError, verify
from learner.disk.layout import CHECKPOINTS, SETTINGS
from learner.run.start import RunStart, locked, plan_start
from learner.run.terminal import say
from protocol.disk.files import move_synced, replace_file
from protocol.errors import OperatorError, SettingsError
from protocol.settings.loader import saved_run_name
from protocol.settings.settings import Settings

_ASIDE = ".tmp-fetched-"  # what a start that died leaves of it is removed when the next checkpoint begins


def start_from_here(settings: Settings, model_digest: str) -> RunStart:
    """Return where the run starts by what its folder holds; touches nothing."""
    return plan_start(settings.run, model_digest)


def start_with_copies(settings: Settings, model_digest: str) -> RunStart:
    """Return where the run starts: as `plan_start` says, once a newer checkpoint of the run was fetched.

    Raises: what `plan_start` raises; SettingsError for a URL that cannot be used; OperatorError when nothing is here of
    the run and the store cannot be asked, or holds another run of its name.
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
            # What came may be complete: then the copies of the run that is next are asked for too.
            return found if found.run_id == start.run_id else start_with_copies(settings, model_digest)
    except StoreError as error:
        if start.checkpoint is None:
            raise OperatorError(
                f"{url} (learner.copy_checkpoints_to) cannot be used: {error}. Nothing is here of the run "
                f"{start.run_id}, and its checkpoints may be there. Put it right, or leave the setting out."
            ) from None
        unasked = f"{url} cannot be asked for newer checkpoints ({error}); the run goes on without."
        return replace(start, notice=f"{start.notice} {unasked}" if start.notice else unasked)
    if copies and (start.checkpoint is None or not start.seen):  # not seen: it begins with another run's checkpoint
        raise OperatorError(
            f"{url} holds checkpoints of a run {start.run_id}, up to step {copies[-1].step}, and this run of that name "
            "is new: both would be mixed there. Choose another run.name or learner.copy_checkpoints_to."
        )
    return start


def copier_of(settings: Settings, start: RunStart) -> CheckpointCopier | None:
    """Return what copies the run's checkpoints, not yet at work; None when they stay where they are."""
    url = settings.learner.copy_checkpoints_to
    if url is None:
        return None
    store, keep = open_store(url, start.run_id), settings.learner.keep_checkpoints
    return CheckpointCopier(store, start.folder, keep, best_of(settings.eval))


class _BrokenCopyError(StoreError):
    """A copy holds other bytes than it was given, or lacks some: an older one may be whole."""


def _fetch_newest(
    copies: Sequence[Copy], store: CopyStore, start: RunStart, settings: Settings, model_digest: str
) -> bool:
    """Bring the newest copy that is whole; returns False where none is newer than what is here, or of this run.

    copies: by step. Raises: as `_fetch` does.
    """
    broken: _BrokenCopyError | None = None
    for copy in reversed(copies):
        if copy.step <= start.step or not _is_to_go_on(copy, store, start, settings):
            break
        try:
            _fetch(copy, store, start, model_digest)
        except _BrokenCopyError as error:
            broken = error
            say(f"{store.url}: {error}. An older one is looked for.")
        else:
            return True
    if broken is not None:
        raise broken
    return False


def _fetch(copy: Copy, store: CopyStore, start: RunStart, model_digest: str) -> None:
    """Bring a copy into the run folder, whole or not at all. Raises: StoreError; as `locked` does."""
    if copy.model_digest != model_digest:
        raise SettingsError(
            f"settings: {store.url}/{start.run_id}/{copy.name} is a checkpoint of another model than policy.model. "
            "Give the model it was made from, or another run.name."
        )
    say(f"Fetching the checkpoint of step {copy.step} from {store.url}.")
    root = start.folder / CHECKPOINTS
    aside, target = root / f"{_ASIDE}{copy.step}", root / f"step_{copy.step:06d}"
    with locked(start):
        try:
            root.mkdir(exist_ok=True)
            for leftover in (aside, target):  # a `target` that was valid would have been started from
                shutil.rmtree(leftover, ignore_errors=True)
            records = store.fetch(copy, aside)
            verify(aside)
            for name in set(KEPT_RECORDS) & records.keys():
                replace_file(start.folder / name, records[name])
            move_synced(aside, target)
        except CorruptCheckpointError as error:
            shutil.rmtree(aside, ignore_errors=True)  # an older one needs the room
            raise _BrokenCopyError(f"the copy of step {copy.step} is not whole ({error})") from None
        except OSError as error:
            raise OperatorError(
                f"The checkpoint of step {copy.step} cannot be brought into {root}: {error.strerror}. Set run.dir to a "
                "folder on a disk with room."
            ) from None


def _is_to_go_on(copy: Copy, store: CopyStore, start: RunStart, settings: Settings) -> bool:
    """Return whether the run that starts is the one that a copy under its name is of, and may go on from there."""
    if settings.run.resume != "auto" or _is_refused_here(copy, start.folder):
        return False
    if start.run_id == settings.run.name or start.checkpoint is not None:
        return True
    # A run behind a complete one has a number behind its name: another one's name may be just that.
    return saved_run_name(store.record(copy, SETTINGS)) == settings.run.name


def _is_refused_here(copy: Copy, folder: Path) -> bool:
    """Return whether the run went back behind this very checkpoint, or refused it, and the store was not told."""
    manifests = (folder / CHECKPOINTS).glob(f"*_step_{copy.step:06d}*/{MANIFEST}")
    return any(manifest_digest(manifest.read_bytes()) == copy.digest for manifest in manifests)
