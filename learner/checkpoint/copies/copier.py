"""A background thread that copies a run's newest checkpoint to a store; training never waits for it."""

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import tenacity

from learner.checkpoint.best import BestBy, find_best_and_unscored
from learner.checkpoint.copies.store import CopyStore, StoreError, manifest_digest
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
_REPEAT_NEWS_S = 600.0
_STALL_S = 120.0  # longest time without a moved byte at the run's end


class CheckpointCopier:
    """Copies the newest checkpoint in a thread, again and again.

    Call order: resume_from, for each step that the run resumes from; take_notices now and then; finish.
    """

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
        store.on_progress = self._note_progress
        self._root = folder / CHECKPOINTS
        self._folder = folder
        self._keep = keep
        self._best_by = best_by
        self._poll_s = poll_s
        self._first_retry_s = first_retry_s
        self._lock = threading.Lock()  # guards _back_to
        self._back_to: int | None = None  # step that the run resumed from, until the store has a mark of it
        self._from_step = 0  # last step of the run's past
        self._own: set[str] = set()  # manifests' digests of this process's copies
        self._done = ""  # digest of the last copy's manifest
        self._problem = ""  # error of the last attempt; empty: it succeeded
        self._reported_at = float("-inf")
        self._progress_at = 0.0
        self._has_stopped = False  # another run copies to the same place
        self._ending = threading.Event()
        self._notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)

    def resume_from(self, step: int) -> None:
        """Note that the run resumes from this step: copies of later steps belong to a past that it left."""
        with self._lock:
            self._back_to = step
        if not self._thread.is_alive():
            self._thread.start()

    def take_notices(self) -> list[str]:
        """Return the messages for the user since the last call."""
        notices = []
        with suppress(queue.Empty):
            while True:
                notices.append(self._notices.get_nowait())
        return notices

    def finish(self, is_stopped: Callable[[], bool], drain_s: float) -> str:
        """Wait for the newest checkpoint's copy while bytes move; returns a warning when it is missing.

        drain_s: longest wait in seconds, once the run is stopped.
        """
        started_at = self._progress_at = time.monotonic()
        for _ in until(float("inf"), 0.05):
            now = time.monotonic()
            has_ended = not self._thread.is_alive() or self._has_stopped or self._next() is None
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
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((StoreError, OSError)),
            wait=tenacity.wait_exponential(self._first_retry_s, max=_LONGEST_RETRY_S),
            sleep=tenacity.sleep_using_event(self._ending),
            stop=tenacity.stop_when_event_set(self._ending),
            before_sleep=self._note_problem,
        )
        while not self._ending.is_set() and not self._has_stopped:
            if self._next() is None and self._back_to is None:
                self._ending.wait(self._poll_s)
                continue
            with suppress(tenacity.RetryError):  # the run ends
                retrying(self._advance)
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

    def _advance(self) -> None:
        """Mark the past that the run left, then copy the newest checkpoint and remove old copies."""
        with self._lock:
            back_to = self._back_to
        if back_to is not None:
            self._store.go_back(back_to)
            self._from_step, self._done = back_to, ""
            with self._lock:
                self._back_to = None if self._back_to == back_to else self._back_to
        if (found := self._next()) is None or self._is_shared():
            return
        path, digest = found
        if digest not in {copy.digest for copy in self._store.copies()}:
            self._own.add(digest)
            with _hard_links(path) as links:
                records = {name: self._folder / name for name in KEPT_RECORDS if (self._folder / name).is_file()}
                self._store.put(links, step_of(path), records)
        self._rotate()
        self._done = digest

    def _is_shared(self) -> bool:
        """Return whether another run of this name copies to the same place; if so, copying ends."""
        later = [copy for copy in self._store.copies() if copy.step > self._from_step]
        others = [copy for copy in later if copy.digest not in self._own]
        if others:
            self._has_stopped = True
            self._problem = f"step {others[-1].step} is there, which this run did not copy"
            self._notices.put(
                f"{self._store.url} holds step {others[-1].step} of a run of this name, which this run did not copy: "
                "another run copies there. This run's checkpoints are not copied any more; give one of them another "
                "run.name or learner.copy_checkpoints_to"
            )
        return bool(others)

    def _rotate(self) -> None:
        copies = self._store.copies()
        # By score: the run folder's `best` names a checkpoint of this machine, and another machine's may be better.
        protected: set[int | None] = set()
        if self._best_by is not None:
            best, awaited = find_best_and_unscored({copy.step for copy in copies}, self._folder, self._best_by)
            protected = {best, *awaited}
        for copy in copies[: -self._keep]:
            if copy.step not in protected:
                self._store.remove(copy)
        self._store.remove_unfinished()

    def _note_progress(self) -> None:
        self._progress_at = time.monotonic()

    def _note_problem(self, attempt: tenacity.RetryCallState) -> None:
        self._problem = str(attempt.outcome.exception() if attempt.outcome else "")
        now = time.monotonic()
        if now - self._reported_at > _REPEAT_NEWS_S:
            self._reported_at = now
            found = self._next()
            work = f"copying the checkpoint of step {step_of(found[0])}" if found else "marking the steps left behind"
            self._notices.put(
                f"{self._store.url}: {work} failed ({self._problem}). It is retried while training continues"
            )

    def _note_success(self) -> None:
        if self._problem and not self._has_stopped:
            self._notices.put(f"Checkpoints are copied to {self._store.url} again")
            self._problem, self._reported_at = "", float("-inf")


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
