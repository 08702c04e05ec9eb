"""A background thread that copies a run's newest checkpoint to a store; training never waits for it."""

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from learner.checkpoint.folder import LATEST, newer_than, step_of
from learner.checkpoint.manifest import MANIFEST
from learner.checkpoint.run_copy import RunCopy, StoreError
from learner.checkpoint.sealed_files import files_under
from learner.disk.run_folder import CHECKPOINTS
from protocol.waits import until

_LINKS = ".copying-"
_POLL_S = 0.5
_FIRST_RETRY_S, _LONGEST_RETRY_S = 2.0, 300.0
_STALL_S = 120.0  # longest time without a moved byte at the run's end


class CheckpointCopier:
    """Copies the newest checkpoint, again and again. Call order: start; take_notices now and then; finish."""

    def __init__(
        self, copy: RunCopy, folder: Path, keep: int, poll_s: float = _POLL_S, first_retry_s: float = _FIRST_RETRY_S
    ) -> None:
        """folder: the run's. keep: number of newest copies that stay, besides those of the folder's checkpoints."""
        self._copy = copy
        self._folder = folder
        self._root = folder / CHECKPOINTS
        self._keep = keep
        self._poll_s = poll_s
        self._first_retry_s = first_retry_s
        self._done = b""  # manifest of the last copied checkpoint
        self._problem = ""  # error of the last attempt; empty: it succeeded
        self._progress_at = 0.0
        self._is_owner = False
        self._is_over = False  # another run copies to the same place
        self._ending = threading.Event()
        self._notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)

    def start(self) -> None:
        """Start the thread. Further calls change nothing, also after its end."""
        if self._thread.ident is None:
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
        return f"The checkpoint of step {step_of(left[0])} has no copy in {self._copy.url}: {reason}."

    def _work(self) -> None:
        for links in self._root.glob(f"{_LINKS}*"):  # a killed command's: they hold checkpoints that were rotated away
            shutil.rmtree(links, ignore_errors=True)
        wait_s = self._first_retry_s
        while not self._ending.is_set() and not self._is_over:
            if (newest := self._next()) is None:
                self._ending.wait(self._poll_s)
                continue
            try:
                self._put(*newest)
            except (StoreError, OSError) as error:
                self._note_problem(step_of(newest[0]), str(error))
                self._ending.wait(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
            else:
                wait_s = self._first_retry_s
                self._note_success()

    def _next(self) -> tuple[Path, bytes] | None:
        """Return the checkpoint in `latest` and its manifest; None when it was copied or is missing."""
        latest = self._root / LATEST
        try:
            path = self._root / latest.readlink().name
            manifest = (path / MANIFEST).read_bytes()
        except OSError:  # no checkpoint yet, or replaced just now
            return None
        return (path, manifest) if manifest != self._done else None

    def _put(self, path: Path, manifest: bytes) -> None:
        """Copy a checkpoint, and remove old copies and those of later steps, which the run left."""
        if not self._is_owner:
            self._copy.claim()
            self._is_owner = True
        elif not self._copy.is_own():
            self._stop()
            return
        step = step_of(path)
        with _hard_links(path) as links:
            self._copy.put(links, step, self._folder, self._note_progress)
        if not self._copy.is_own():  # the copy took minutes, and other runs' checkpoints must stay
            self._stop()
            return
        past = [each for each in self._copy.steps() if each <= step]
        self._copy.remove_all_but({*past[-self._keep :], *map(step_of, newer_than(self._root, -1))} & set(past))
        self._done = manifest

    def _stop(self) -> None:
        self._is_over = True
        self._problem = "another run of this name copies there"
        self._notices.put(
            f"{self._copy.url}: {self._problem}. This run's checkpoints are not copied any more; give one of them "
            "another run.name or learner.copy_checkpoints_to"
        )

    def _note_progress(self) -> None:
        self._progress_at = time.monotonic()

    def _note_problem(self, step: int, problem: str) -> None:
        if not self._problem:
            self._notices.put(
                f"{self._copy.url}: copying the checkpoint of step {step} failed ({problem}). It is retried while "
                "training continues"
            )
        self._problem = problem

    def _note_success(self) -> None:
        if self._problem and not self._is_over:
            self._notices.put(f"Checkpoints are copied to {self._copy.url} again")
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
