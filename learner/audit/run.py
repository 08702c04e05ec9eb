"""A run folder opened for reading: one consistent view of its ledger, its settings, its prompts' uids, its metrics.

Nothing in the folder is written, whether the run is under way, was killed, or
ended: SQLite alone may renew its lock table (`ledger.sqlite-shm`) beside a write-ahead log.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.data.prompt_reading import RowName, read_prompts
from learner.disk.layout import CHECKPOINTS, LEDGER
from learner.disk.skipped_rows import read_skipped
from learner.ledger.schema import add_missing_tables_in_memory
from protocol.errors import OperatorError, SettingsError
from protocol.settings.loader import load_saved_settings
from protocol.settings.settings import Settings

# The rules go over prompts and trajectories in the order of groups, which is not that of the file.
_CACHE_KIB = 256 * 1024
_MAX_MOMENTS = 100


@dataclass(frozen=True)
class AuditedRun:
    """A run's files as they were at one moment."""

    folder: Path  # the run's
    settings: Settings  # of its settings.yaml: those of its last start
    uids: list[str]  # of the prompts that it trains on, in the order of their files
    db: sqlite3.Connection  # its ledger, inside one read transaction
    metrics: bytes  # bytes of metrics.jsonl when that transaction began; empty without the file
    checkpoints: list[Path]  # their folders just before it began, in step order
    rows_by_entry: Sequence[int] = ()  # how many of the prompts each entry of data.train has; empty: it is one

    def rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Return the rows of a query over the ledger."""
        return self.db.execute(query, values)

    def meta(self, key: str) -> str | None:
        """Return what the ledger says under a key, None when nothing."""
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else None


@contextmanager
def open_run(folder: Path, data: Path | None) -> Iterator[AuditedRun]:
    """Yield the run in a folder. data: where the training prompts lie now, None: where the settings say.

    Raises: SettingsError for a folder that is no run's, or prompts that are not there; OperatorError for a ledger that
    cannot be read.
    """
    for name in ("", "settings.yaml", LEDGER):
        if not (folder / name).exists():
            problem = f"has no {name}" if name else "does not exist"
            raise SettingsError(f"{folder} {problem}. Give the folder of a run, such as runs/NAME.")
    settings = load_saved_settings(folder / "settings.yaml")
    uids, rows_by_entry = _read_uids(folder, settings, data)
    path = folder / LEDGER
    try:
        with closing(sqlite3.connect(read_only(path), uri=True, isolation_level=None)) as db:
            db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            add_missing_tables_in_memory(db, path)
            # Before the ledger's moment: what a checkpoint made after it says, the ledger would not know yet.
            checkpoints = sorted((folder / CHECKPOINTS).glob("step_*"))
            metrics = _begin(db, folder / "metrics.jsonl")
            yield AuditedRun(folder, settings, uids, db, metrics, checkpoints, rows_by_entry)
    except sqlite3.Error as error:
        raise OperatorError(
            f"The ledger {path} cannot be read: {error}. While {LEDGER}-wal is beside it, this user must be allowed to "
            "write in the folder; a ledger that is damaged is put back by resuming the run from a checkpoint."
        ) from None


def _begin(db: sqlite3.Connection, metrics: Path) -> bytes:
    """Begin the read transaction at a moment in which no step is being recorded; returns the metrics of that moment.

    A run that records steps without pause is taken as it is after a while: its metrics may then be a few lines ahead.
    """
    for _ in range(_MAX_MOMENTS):
        before = _read(metrics)
        db.execute("BEGIN")
        db.execute("SELECT COUNT(*) FROM meta").fetchone()  # the view of a transaction is that of its first read
        if (after := _read(metrics)) == before:
            break
        db.execute("ROLLBACK")
    else:
        db.execute("BEGIN")
    return after


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def read_only(path: Path) -> str:
    """Return the URI under which SQLite reads a ledger and writes nothing of it.

    Without a write-ahead log there is nobody to share with: then SQLite is kept from making files of its own, too.
    """
    is_shared = path.with_name(f"{path.name}-wal").exists()
    return f"{path.resolve().as_uri()}?{'mode=ro' if is_shared else 'mode=ro&immutable=1'}"


def _read_uids(folder: Path, settings: Settings, data: Path | None) -> tuple[list[str], list[int]]:
    """Return the prompts' uids, and how many of them each entry of data.train has."""
    given = str(data) if data is not None else settings.data.train
    if not given:  # a warm start alone
        return [], []
    try:
        without = [RowName(row.file, row.number) for row in read_skipped(folder)]
        index, _ = read_prompts(given, settings.data, without=without)
        return [index.uid(place) for place in range(len(index))], index.rows_by_entry
    except SettingsError as error:
        raise SettingsError(
            f"{error} The audit compares the ledger with the prompts that the run was given: name the file with --data."
        ) from None
