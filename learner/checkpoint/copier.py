"""A background thread that copies a run's newest checkpoint to a store; training never waits for it."""

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from learner.checkpoint.best import BestBy, find_best_and_unscored
from learner.checkpoint.copy_store import CopyStore, StoreError, manifest_digest
from learner.checkpoint.folder import LATEST, step_of
from learner.checkpoint.manifest import MANIFEST
from learner.checkpoint.sealed_files import files_under
from learner.disk.run_folder import CHECKPOINTS, RECORDS, SETTINGS, SKIPPED_ROWS
from protocol.waits import until

# Files of the run folder that a start on an empty machine continues.
KEPT_RECORDS = (*RECORDS, SKIPPED_ROWS, SETTINGS)
_LINKS = ".copying-"
_POLL_S = 0.5
_FIRST_RETRY_S, _LONGEST_RETRY_S = 2.0, 300.0
_STALL_S = 120.0  # longest time without a moved byte at the run's end


class CheckpointCopier:
    """Copies the newest checkpoint, again and again. Call order: start; take_notices now and then; finish."""

    def __init__(
        self,
        store: CopyStore,
        folder: Path,
        keep: int,
        best_by: BestBy | None = None,
        poll_s: float = _POLL_S,
        first_retry_s: float = _FIRST_RETRY_S,
    ) -> None:
        """folder: the run's. keep: number of newest copies that stay. best_by: the metric of the best copy, which also
        stays; None: no best copy.
        """
        self._store = store
        self._root = folder / CHECKPOINTS
        self._folder = folder
        self._keep = keep
        self._best_by = best_by
        self._poll_s = poll_s
        self._first_retry_s = first_retry_s
        self._expected: str | None = None  # name of the newest copy after this process's last look; None: no look yet
        self._done = ""  # digest of the last copy's manifest
        self._problem = ""  # error of the last attempt; empty: it succeeded
        self._progress_at = 0.0
        self._is_shared = False  # another run copies to the same place
        self._ending = threading.Event()
        self._notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)

    def start(self) -> None:
        """Start the thread. Further calls change nothing."""
        if not self._thread.is_alive():
            self._thread.start()

    def take_notices(self) -> list[str]:
        """Return the messages for the user since the last call."""
        return [self._notices.get_nowait() for _ in range(self._notices.qsize())]

    def finish(self, is_stopped: Callable[[], bool], drain_s: float) -> str:
        """Wait for the newest checkpoint's copy while bytes move; returns a warning when it is missing.

        drain_s: longest wait in seconds, once the run is stopped.
        """
        started_at = self._progress_at = time.monotonic()
        for _ in until(float("inf"), 0.05):
            now = time.monotonic()
            has_ended = not self._thread.is_alive() or self._next() is None
            if has_ended or now - self._progress_at > _STALL_S or (is_stopped() and now - started_at > drain_s):
                break
        self._ending.set()
        if (left := self._next()) is None:
            return ""
        reason = self._problem or "the copying did not end in time"
        return f"The checkpoint of step {step_of(left[0])} has no copy in {self._store.url}: {reason}."

    def _work(self) -> None:
        for links in self._root.glob(f"{_LINKS}*"):  # a killed command's: they hold checkpoints that were rotated away
            shutil.rmtree(links, ignore_errors=True)
        wait_s = self._first_retry_s
        while not self._ending.is_set() and not self._is_shared:
            if (newest := self._next()) is None:
                self._ending.wait(self._poll_s)
                continue
            try:
                self._copy(*newest)
            except (StoreError, OSError) as error:
                self._note_problem(step_of(newest[0]), str(error))
                self._ending.wait(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
            else:
                wait_s = self._first_retry_s
                self._note_success()

    def _next(self) -> tuple[Path, str] | None:
        """Return the checkpoint in `latest` and its manifest's digest; None when it was copied or is missing."""
        latest = self._root / LATEST
        try:
            path = self._root / latest.readlink().name
            digest = manifest_digest((path / MANIFEST).read_bytes())
        except OSError:  # no checkpoint yet, or replaced just now
            return None
        return (path, digest) if digest != self._done else None

    def _copy(self, path: Path, digest: str) -> None:
        """Copy a checkpoint unless it is the newest copy, and remove old copies."""
        copies = self._store.copies()
        newest = copies[-1].name if copies else ""
        if self._expected not in (None, newest):
            self._stop_sharing(newest)
            return
        if not copies or copies[-1].digest != digest:
            self._store.remove_all_but([copy.name for copy in copies])  # parts of failed attempts, which fill the disk
            with _hard_links(path) as links:
                records = {name: self._folder / name for name in KEPT_RECORDS if (self._folder / name).is_file()}
                newest = self._store.put(links, step_of(path), records, self._note_progress)
        self._expected = newest
        self._remove_old()
        self._done = digest

    def _stop_sharing(self, newest: str) -> None:
        self._is_shared = True
        self._problem = f"{newest or 'no copy'} is the newest, which this run did not copy"
        self._notices.put(
            f"{self._store.url}: {self._problem}: another run of this name copies there. This run's checkpoints are "
            "not copied any more; give one of them another run.name or learner.copy_checkpoints_to"
        )

    def _remove_old(self) -> None:
        copies = self._store.copies()
        # By score: the run folder's `best` names a checkpoint of this machine, and another machine's may be better.
        protected: set[int | None] = set()
        if self._best_by is not None:
            best, awaited = find_best_and_unscored({copy.step for copy in copies}, self._folder, self._best_by)
            protected = {best, *awaited}
        oldest = copies[-self._keep :][0].step
        self._store.remove_all_but([copy.name for copy in copies if copy.step >= oldest or copy.step in protected])

    def _note_progress(self) -> None:
        self._progress_at = time.monotonic()

    def _note_problem(self, step: int, problem: str) -> None:
        if not self._problem:
            self._notices.put(
                f"{self._store.url}: copying the checkpoint of step {step} failed ({problem}). It is retried while "
                "training continues"
            )
        self._problem = problem

    def _note_success(self) -> None:
        if self._problem and not self._is_shared:
            self._notices.put(f"Checkpoints are copied to {self._store.url} again")
            self._problem = ""


@contextmanager
def _hard_links(path: Path) -> Iterator[Path]:
    """Yield a folder with links to the checkpoint's files, which stay when the checkpoint is rotated away.

    It is the checkpoint itself where the file system has no hard links.
    """
    links = path.with_name(f"{_LINKS}{path.name}")
    shutil.rmtree(links, ignore_errors=True)
    try:
        for name, file in files_under(path).items():
            (links / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(file, links / name)
    except OSError:
        yield path
    else:
        yield links
    finally:
        shutil.rmtree(links, ignore_errors=True)
