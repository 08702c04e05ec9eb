"""Copies of the ledger for checkpoints: each is of one moment, and is made while the ledger is written.

`in_a_thread` makes a copy beside the coordinator's loop, so that no lease, ping or acknowledgement waits for it;
`at_once` makes it before the caller continues.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from protocol.disk.files import aside_of
from protocol.errors import FrameError, OperatorError
from protocol.failpoints import failpoint

# 16 MiB of the ledger's pages of 4 KiB: the copy checks after each part whether it was cancelled.
_PAGES = 4096
_CLOSE_S = 10.0
Work = Callable[[], None]


def at_once(work: Work) -> None:
    work()


def in_a_thread(work: Work) -> None:
    """Do the work in a thread. The process may end first: half a copy has no name."""
    threading.Thread(target=work, name="ledger copy", daemon=True).start()


class LedgerCopy:
    """A copy of everything that was committed when this object was made, written by `make`, in any thread.

    It holds a read transaction of its own until `make` has ended. Until then the write-ahead log keeps all commits.
    """

    def __init__(self, ledger: Path, path: Path) -> None:
        """path: file of the copy. Raises: OperatorError when the ledger cannot be read."""
        self.path = path
        self._is_cancelled = threading.Event()
        failpoint("ledger.snapshot.begun")
        try:
            # Opened by the coordinator's thread, read and closed by the thread that makes the copy.
            self._db = sqlite3.connect(
                f"{ledger.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
            )
            self._db.execute("BEGIN")
            # A transaction's moment is that of its first read.
            self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchall()
        except sqlite3.Error as error:
            raise self._problem(error) from None

    def make(self) -> bool:
        """Write the copy; returns False when it was cancelled. A file has the copy's name only when it is whole.

        Blocks: about 3 s for 700 MB. To be called once. Raises: OperatorError when it cannot be written.
        """
        aside = aside_of(self.path)
        try:
            with contextlib.closing(self._db):
                aside.unlink(missing_ok=True)
                is_whole = self._write(aside)
            if is_whole:
                aside.replace(self.path)
            else:
                aside.unlink(missing_ok=True)
        except (sqlite3.Error, OSError) as error:
            raise self._problem(error) from None
        failpoint("ledger.snapshot.after")
        return is_whole

    def cancel(self) -> None:
        """Have `make` end soon, in whatever thread, without a file."""
        self._is_cancelled.set()

    def _write(self, aside: Path) -> bool:
        with contextlib.closing(sqlite3.connect(aside)) as copy:
            try:
                self._db.backup(copy, pages=_PAGES, progress=self._check_cancelled)
            except _CopyCancelled:
                return False
            failpoint("ledger.snapshot.copied")
            # The copy inherits the WAL mode: opened as it is, it would add two more files to a checkpoint.
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
    """The copies that rank 0 asks for, one at a time. A repeated question starts no second copy."""

    def __init__(self, begin_copy: Callable[[Path], LedgerCopy], start: Callable[[Work], None] = at_once) -> None:
        """begin_copy: `Ledger.begin_copy`. start: makes a copy, at once or in a thread."""
        self._begin_copy = begin_copy
        self._start = start
        self._running: _RunningCopy | None = None
        self._made: set[tuple[Path, int]] = set()  # questions of this start of the run, one for each checkpoint
        self._answers: list[tuple[str, int]] = []

    def knows(self, path: Path, request: int) -> bool:
        """Return whether this question has started a copy: its file may be there, or moved with its folder."""
        question = (path, request)
        return question in self._made or (self._running is not None and self._running.question == question)

    @property
    def has_questions(self) -> bool:
        """False when `take_answers` will return nothing until the next question."""
        return self._running is not None or bool(self._answers)

    @property
    def is_making(self) -> bool:
        """True while a copy is not whole."""
        return self._running is not None and not self._running.has_ended.is_set()

    def ask(self, peer: str, path: Path, request: int) -> None:
        """Start the copy of this moment, unless this question has started it before.

        Raises: FrameError while another question's copy is running; OperatorError when the ledger cannot be read.
        """
        question = (path, request)
        if question in self._made:
            # The copy may be part of a checkpoint's manifest by now.
            self._answers.append((peer, request))
            return
        if self._running is None:
            self._running = _RunningCopy(question, self._begin_copy(path))
            self._start(self._running.make)
        elif self._running.question != question:
            problem = f"is asked for while the copy {self._running.question[0]} is under way"
            raise FrameError("$.path", problem, "busy")
        self._running.peers.add(peer)

    def take_answers(self) -> list[tuple[str, int]]:
        """Return (peer, request) of each question whose copy is whole, and forget them.

        Raises: the error of a copy, an OperatorError for a full disk.
        """
        ended = self._running
        if ended is not None and ended.has_ended.is_set():
            self._running = None
            if ended.error is not None:
                raise ended.error
            self._made.add(ended.question)
            self._answers += [(peer, ended.question[1]) for peer in sorted(ended.peers)]
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Cancel the running copy. Blocks until its last write has ended, at most 10 s; a slower disk keeps a thread
        busy, whose file gets no name."""
        if self._running is not None:
            self._running.copy.cancel()
            self._running.has_ended.wait(_CLOSE_S)


class _RunningCopy:
    """A copy that is being made, the peers that wait for it, and its error."""

    def __init__(self, question: tuple[Path, int], copy: LedgerCopy) -> None:
        self.question = question
        self.copy = copy
        self.peers: set[str] = set()
        self.error: BaseException | None = None
        self.has_ended = threading.Event()

    def make(self) -> None:
        try:
            self.copy.make()
        except BaseException as error:  # raised again in the coordinator's thread, which it ends
            self.error = error
        finally:
            self.has_ended.set()
