"""One copy of the ledger for a checkpoint: of a moment, made while the ledger goes on.

It may be made in a thread of its own: it shares no connection with the ledger.
"""

import contextlib
import sqlite3
import threading
from pathlib import Path

from protocol.disk.files import aside_of
from protocol.errors import OperatorError
from protocol.failpoints import failpoint

# 16 MiB of the ledger's pages of 4 KiB: how much is written before the copy looks whether it is still wanted.
_PAGES = 4096


class LedgerCopy:
    """Everything that was committed when this was made, and nothing later. `path`: where the copy will stand.

    It holds a read transaction of its own until `make` has ended. The ledger's write-ahead log meanwhile keeps all that
    is committed, and is used again from its beginning afterwards.
    """

    def __init__(self, ledger: Path, path: Path) -> None:
        """Raises: OperatorError when the ledger cannot be read."""
        self.path = path
        self._is_given_up = threading.Event()
        failpoint("ledger.snapshot.begun")
        try:
            # Opened by the coordinator's thread, read and closed by the one that makes the copy.
            self._db = sqlite3.connect(
                f"{ledger.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
            )
            self._db.execute("BEGIN")
            # The moment of a transaction is that of its first read.
            self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchall()
        except sqlite3.Error as error:
            raise self._problem(error) from None

    def make(self) -> bool:
        """Write the copy as one file, which has its name only when it is whole; False when it was given up.

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

    def give_up(self) -> None:
        """Have `make` end soon, in whatever thread, and leave no file."""
        self._is_given_up.set()

    def _write(self, aside: Path) -> bool:
        with contextlib.closing(sqlite3.connect(aside)) as copy:
            try:
                self._db.backup(copy, pages=_PAGES, progress=self._look_up)
            except _GivenUp:
                return False
            failpoint("ledger.snapshot.copied")
            # The copy inherits the WAL mode: opened as it is, it would grow two more files inside a checkpoint.
            copy.execute("PRAGMA journal_mode=DELETE")
        return not self._is_given_up.is_set()

    def _look_up(self, status: int, remaining: int, total: int) -> None:
        if self._is_given_up.is_set():
            raise _GivenUp

    def _problem(self, error: Exception) -> OperatorError:
        return OperatorError(f"The ledger's copy {self.path} cannot be written: {error}. Check the disk.")


class _GivenUp(Exception):
    """Ends a copy between two of its parts."""
