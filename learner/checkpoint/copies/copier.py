"""A run's newest checkpoint brought to a store again and again, by a thread of its own: training never waits for it."""

import contextlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from learner.checkpoint.best import BestBy, best_and_awaited
from learner.checkpoint.copies.store import CopyStore, StoreError, copy_name
from learner.checkpoint.folder import LATEST, step_of
from learner.checkpoint.manifest import MANIFEST
from learner.checkpoint.sealed_files import files_under
from learner.disk.layout import CHECKPOINTS, RECORDS, SETTINGS, SKIPPED_ROWS

# The run folder's own files that a start on an empty machine goes on with.
KEPT_RECORDS = (*RECORDS, SKIPPED_ROWS, SETTINGS)
_LINKS = ".copying-"
_POLL_S = 0.5
_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 2.0, 300.0
_TELL_AGAIN_S = 600.0
# At the run's end: the longest time in which no byte moves.
_STILL_S = 120.0


class CheckpointCopier:
    """Call order: goes_on_from, as often as the run goes back to a checkpoint; take_news meanwhile; finish."""

    def __init__(
        self,
        store: CopyStore,
        folder: Path,
        keep: int,
        best_by: BestBy | None = None,
        poll_s: float = _POLL_S,
        shortest_retry_s: float = _SHORTEST_RETRY_S,
    ) -> None:
        """folder: the run's. keep: how many copies stay in the store, beside that of the best of its checkpoints there.

        best_by: how the best is chosen; None: none is kept.
        """
        self._store = store
        store.moved = self._note_moved
        self._root = folder / CHECKPOINTS
        self._folder = folder
        self._keep = keep
        self._best_by = best_by
        self._poll_s = poll_s
        self._retry_s = self._shortest_retry_s = shortest_retry_s
        self._lock = threading.Lock()  # of the next
        self._go_back_to: int | None = None  # step after which copies are to be set aside; None: they have been
        self._from_step = 0  # the last step of the run's past
        self._own: set[str] = set()  # names of what this process has copied
        self._done = ""  # name of the last copy that is in the store
        self._problem = ""  # of the last attempt; empty: it succeeded
        self._told_at = float("-inf")
        self._moved_at = 0.0
        self._is_given_up = False
        self._ending = threading.Event()
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)

    def goes_on_from(self, step: int) -> None:
        """Say that the run goes on from this step: copies of later ones are of a past that it gave up."""
        with self._lock:
            self._go_back_to = step
        if not self._thread.is_alive():
            self._thread.start()

    def take_news(self) -> list[str]:
        """Return what the user should be told since the last call."""
        news = []
        with contextlib.suppress(queue.Empty):
            while True:
                news.append(self._news.get_nowait())
        return news

    def finish(self, is_stopped: Callable[[], bool], drain_s: float) -> str:
        """Wait for the newest checkpoint's copy while bytes move; returns what is to be said when there is none.

        drain_s: the longest wait, in seconds, once the run is told to stop.
        """
        begun_at = self._moved_at = time.monotonic()
        while self._thread.is_alive() and not self._is_given_up and self._newest() is not None:
            now = time.monotonic()
            if now - self._moved_at > _STILL_S or (is_stopped() and now - begun_at > drain_s):
                break
            time.sleep(0.05)
        self._ending.set()
        left = self._newest()
        if left is None:
            return ""
        why = self._problem or "the copying did not end in time"
        return f"The checkpoint of step {step_of(left)} has no copy in {self._store.url}: {why}."

    def _work(self) -> None:
        for links in self._root.glob(f"{_LINKS}*"):  # of a command that was killed: they hold what was rotated away
            shutil.rmtree(links, ignore_errors=True)
        while not self._ending.is_set() and not self._is_given_up:
            path = self._newest()
            if path is None and self._go_back_to is None:
                self._ending.wait(self._poll_s)
                continue
            try:
                self._advance(path)
            except (StoreError, OSError) as error:
                self._note_problem(error, path)
                self._ending.wait(self._retry_s)
                self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            else:
                self._note_success()

    def _newest(self) -> Path | None:
        """Return the checkpoint that `latest` names, None when that is in the store or there is none."""
        latest = self._root / LATEST
        try:
            path = self._root / latest.readlink().name
            name = copy_name(step_of(path), (path / MANIFEST).read_bytes())
        except (OSError, ValueError):  # none yet, or replaced just now
            return None
        return path if name != self._done else None

    def _advance(self, path: Path | None) -> None:
        """Set aside what the run gave up, then copy a checkpoint and remove what is older than the newest `keep`."""
        with self._lock:
            back_to, self._go_back_to = self._go_back_to, None
        try:
            if back_to is not None:
                self._set_aside_after(back_to)
        except StoreError:
            with self._lock:
                self._go_back_to = back_to if self._go_back_to is None else self._go_back_to
            raise
        if path is None or self._is_anothers():
            return
        step = step_of(path)
        name = copy_name(step, (path / MANIFEST).read_bytes())
        if all(copy.name != name for copy in self._store.whole_copies()):
            self._own.add(name)
            with _linked(path) as links:
                records = {name: self._folder / name for name in KEPT_RECORDS if (self._folder / name).is_file()}
                self._store.put(links, step, records)
        self._rotate()
        self._done = name

    def _set_aside_after(self, step: int) -> None:
        for copy in self._store.whole_copies():
            if copy.step > step:
                self._store.set_aside(copy)
        self._from_step, self._done = step, ""

    def _is_anothers(self) -> bool:
        """Return whether somebody else copies a run of this name to the same place."""
        others = [one for one in self._store.whole_copies() if one.step > self._from_step and one.name not in self._own]
        if others:
            self._is_given_up = True
            self._problem = f"step {others[-1].step} is there, which this run did not copy"
            self._news.put(
                f"{self._store.url} holds step {others[-1].step} of a run of this name, which this run did not copy: "
                "another one copies there. This run's checkpoints are copied no more; give one of them another "
                "run.name or learner.copy_checkpoints_to"
            )
        return bool(others)

    def _rotate(self) -> None:
        copies = self._store.whole_copies()
        # By their scores: the run folder's `best` names one of this machine's, and the best may be another machine's.
        protected: set[int | None] = set()
        if self._best_by is not None:
            best, awaited = best_and_awaited({copy.step for copy in copies}, self._folder, self._best_by)
            protected = {best, *awaited}
        for copy in copies[: -self._keep]:
            if copy.step not in protected:
                self._store.remove(copy)
        self._store.remove_unfinished()

    def _note_moved(self) -> None:
        self._moved_at = time.monotonic()

    def _note_problem(self, error: Exception, path: Path | None) -> None:
        self._problem = str(error)
        now = time.monotonic()
        if now - self._told_at > _TELL_AGAIN_S:
            self._told_at = now
            what = f"copying the checkpoint of step {step_of(path)}" if path else "setting aside steps given up"
            self._news.put(f"{self._store.url}: {what} failed ({error}). It is tried again; training goes on")

    def _note_success(self) -> None:
        if self._problem and not self._is_given_up:
            self._news.put(f"Checkpoints are copied to {self._store.url} again")
            self._problem, self._told_at = "", float("-inf")
        self._retry_s = self._shortest_retry_s


@contextlib.contextmanager
def _linked(path: Path) -> Iterator[Path]:
    """Yield a folder with the checkpoint's files, which stays when the checkpoint is rotated away meanwhile.

    That is the checkpoint's own where the disk knows no hard links.
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
