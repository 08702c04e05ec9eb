"""Consistent copies of the ledger for checkpoints, made in a thread while the coordinator keeps writing to it."""

import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from protocol.disk.files import aside_of
from protocol.errors import FrameError, OperatorError
from protocol.failpoints import failpoint

# 16 MiB in pages of 4 KiB; each part checks for cancellation.
_PAGES_PER_PART = 4096
_CLOSE_S = 10.0
Work = Callable[[], None]


def run_now(work: Work) -> None:
    """Do the work before the caller continues."""
    work()


def run_in_thread(work: Work) -> None:
    """Do the work in a daemon thread. An incomplete copy keeps a temporary name."""
    threading.Thread(target=work, name="ledger copy", daemon=True).start()


class LedgerCopy:
    """A copy of everything that was committed at its creation. `make` writes it, in any thread.

    Until `make` ends, a read transaction keeps all commits in the write-ahead log.
    """

    def __init__(self, ledger: Path, path: Path) -> None:
        """path: file of the copy. Raises: OperatorError when the ledger cannot be read."""
        self.path = path
        self._is_cancelled = threading.Event()
        failpoint("ledger.snapshot.begun")
        try:
            # Opened by one thread, read and closed by another.
            self._db = sqlite3.connect(
                f"{ledger.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
            )
            self._db.execute("BEGIN")
            # A transaction's moment is that of its first read.
            self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchall()
        except sqlite3.Error as error:
            raise self._problem(error) from None

    def make(self) -> bool:
        """Write the copy; returns False when it was cancelled. Call it once.

        Writes to a temporary name and renames the finished file. Blocks: about 3 s for 700 MB.
        Raises: OperatorError when it cannot be written.
        """
        aside = aside_of(self.path)
        try:
            with contextlib.closing(self._db):
                aside.unlink(missing_ok=True)
                is_complete = self._write(aside)
            if is_complete:
                aside.replace(self.path)
            else:
                aside.unlink(missing_ok=True)
        except (sqlite3.Error, OSError) as error:
            raise self._problem(error) from None
        failpoint("ledger.snapshot.after")
        return is_complete

    def cancel(self) -> None:
        """Make a running `make` end early, without a file. Safe to call from any thread."""
        self._is_cancelled.set()

    def _write(self, aside: Path) -> bool:
        with contextlib.closing(sqlite3.connect(aside)) as copy:
            try:
                self._db.backup(copy, pages=_PAGES_PER_PART, progress=self._check_cancelled)
            except _CopyCancelled:
                return False
            failpoint("ledger.snapshot.copied")
            # In WAL mode the copy would add two files to a checkpoint.
            copy.execute("PRAGMA journal_mode=DELETE")
        return not self._is_cancelled.is_set()

    def _check_cancelled(self, status: int, remaining: int, total: int) -> None:
        if self._is_cancelled.is_set():
            raise _CopyCancelled

    def _problem(self, error: Exception) -> OperatorError:
        return OperatorError(f"The ledger's copy {self.path} cannot be written: {error}. Check the disk.")


class _CopyCancelled(Exception):
    """Ends a copy between two of its parts."""


class LedgerCopies:
    """The copies that rank 0 requests, one at a time. A repeated path and number start no second copy."""

    def __init__(self, begin_copy: Callable[[Path], LedgerCopy], start: Callable[[Work], None] = run_now) -> None:
        """begin_copy: `Ledger.begin_copy`. start: runs a copy's work, `run_now` or `run_in_thread`."""
        self._begin_copy = begin_copy
        self._start = start
        self._running: _RunningCopy | None = None
        self._completed: set[tuple[Path, int]] = set()  # requests since the start of the process
        self._to_confirm: list[tuple[str, int]] = []  # (peer, request number) that `take_finished` returns next

    def has_request(self, path: Path, request: int) -> bool:
        """Return whether this request has started a copy."""
        key = (path, request)
        return key in self._completed or (self._running is not None and self._running.key == key)

    @property
    def has_pending(self) -> bool:
        """False when `take_finished` returns nothing until the next request."""
        return self._running is not None or bool(self._to_confirm)

    @property
    def is_making(self) -> bool:
        """True while a copy is being written."""
        return self._running is not None and not self._running.has_ended.is_set()

    def request_copy(self, peer: str, path: Path, request: int) -> None:
        """Start a copy, unless this request has started it before.

        Raises: FrameError while another request's copy is running; OperatorError when the ledger cannot be read.
        """
        key = (path, request)
        if key in self._completed:
            # Not written again: it may be in a checkpoint's manifest.
            self._to_confirm.append((peer, request))
            return
        if self._running is None:
            self._running = _RunningCopy(key, self._begin_copy(path))
            self._start(self._running.make)
        elif self._running.key != key:
            problem = f"is requested while the copy {self._running.key[0]} is being written"
            raise FrameError("$.path", problem, "busy")
        self._running.peers.add(peer)

    def take_finished(self) -> list[tuple[str, int]]:
        """Return (peer, request number) of each request whose copy is complete, and forget them.

        Raises: the error of a copy, such as an OperatorError for a full disk.
        """
        ended = self._running
        if ended is not None and ended.has_ended.is_set():
            self._running = None
            if ended.error is not None:
                raise ended.error
            self._completed.add(ended.key)
            self._to_confirm += [(peer, ended.key[1]) for peer in sorted(ended.peers)]
        finished, self._to_confirm = self._to_confirm, []
        return finished

    def close(self) -> None:
        """Cancel the running copy. Blocks until its last write ends, at most 10 s.

        On a slower disk the thread continues, and leaves no file under the copy's name.
        """
        if self._running is not None:
            self._running.copy.cancel()
            self._running.has_ended.wait(_CLOSE_S)


class _RunningCopy:
    """A copy that is being written, the peers that wait for it, and its error."""

    def __init__(self, key: tuple[Path, int], copy: LedgerCopy) -> None:
        self.key = key
        self.copy = copy
        self.peers: set[str] = set()
        self.error: BaseException | None = None
        self.has_ended = threading.Event()

    def make(self) -> None:
        try:
            self.copy.make()
        except BaseException as error:  # `take_finished` raises it in the coordinator's thread
            self.error = error
        finally:
            self.has_ended.set()
