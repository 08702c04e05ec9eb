"""One consistent view of a run folder's ledger, settings, prompts and metrics; and breaches.

Nothing in the folder is written; only SQLite may renew `ledger.sqlite-shm` next to a write-ahead log.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.data.prompt_reading import RowName, read_prompts
from learner.disk.run_folder import CHECKPOINTS, LEDGER, TOKENS, read_only_uri, read_skipped
from learner.disk.token_books import attach_books
from learner.ledger.schema import is_new
from protocol.errors import OperatorError, SettingsError
from protocol.settings.loader import load_saved_settings
from protocol.settings.settings import Settings

# The rules do not read in the order of the file.
_CACHE_KIB = 256 * 1024
_MAX_MOMENTS = 100
MAX_LINES_PER_RULE = 100


@dataclass(frozen=True)
class Breach:
    """One breach of a rule.

    Example:
    >>> str(Breach("group_size", "trajectories of its step: 3, expected 4", group="e0-a", step=2))
    'ledger.sqlite, group e0-a, step 2: trajectories of its step: 3, expected 4'
    """

    rule: str
    problem: str  # found and expected facts
    file: str = LEDGER  # path inside the run folder
    group: str | None = None
    step: int | None = None  # step, from 1

    def __str__(self) -> str:
        where = [self.file]
        where += [f"group {self.group}"] if self.group is not None else []
        where += [f"step {self.step}"] if self.step is not None else []
        return f"{', '.join(where)}: {self.problem}"


@dataclass(frozen=True)
class Breaches:
    """All breaches, counted; the first of each rule are kept."""

    counts: dict[str, int]  # rule -> number of its breaches; empty: the promise holds
    shown: list[Breach]  # breaches in the order found, at most MAX_LINES_PER_RULE of each rule

    def lines(self) -> list[str]:
        """Return one line for each breach shown, then one for each rule with more."""
        more = {rule: count - MAX_LINES_PER_RULE for rule, count in self.counts.items() if count > MAX_LINES_PER_RULE}
        return [str(breach) for breach in self.shown] + [
            f"and {count:,} more that break the rule {rule}" for rule, count in more.items()
        ]


def collect(found: Iterable[Breach]) -> Breaches:
    """Count the breaches, and keep the first of each rule."""
    counts: Counter[str] = Counter()
    shown: list[Breach] = []
    for breach in found:
        counts[breach.rule] += 1
        if counts[breach.rule] <= MAX_LINES_PER_RULE:
            shown.append(breach)
    return Breaches(dict(counts), shown)


@dataclass(frozen=True)
class AuditedRun:
    """A run's files as they were at one moment."""

    folder: Path
    settings: Settings  # settings of its last start, from settings.yaml
    uids: list[str]  # uids of its training prompts, in the order of their files
    db: sqlite3.Connection  # ledger, inside one read transaction
    metrics: bytes  # bytes of metrics.jsonl when that transaction began; empty without the file
    checkpoints: list[Path]  # folders of the checkpoints just before it began, in step order
    rows_by_entry: Sequence[int] = ()  # number of prompts of each entry of data.train; empty: one entry

    def rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        return self.db.execute(query, values)

    def meta(self, key: str) -> str | None:
        """Return the ledger's value of a key, None without one."""
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else None

    def last_shared_version(self, incarnation: int) -> int | None:
        """Return the newest version that results of this start may contain; None when no start came after it."""
        row = self.db.execute(
            "SELECT MIN(policy_version) FROM incarnations WHERE number > ?", (incarnation,)
        ).fetchone()
        return None if row[0] is None else int(row[0])


@contextmanager
def open_run(folder: Path, data: Path | None) -> Iterator[AuditedRun]:
    """Yield the run in a folder. data: the present path of the training prompts, None: the settings'.

    Raises: SettingsError for a folder without a run, or missing prompts; OperatorError for a ledger that cannot be
    read.
    """
    for name in ("", "settings.yaml", LEDGER):
        if not (folder / name).exists():
            problem = f"has no {name}" if name else "does not exist"
            raise SettingsError(f"{folder} {problem}. Give the folder of a run, such as runs/NAME.")
    settings = load_saved_settings(folder / "settings.yaml")
    uids, rows_by_entry = _read_uids(folder, settings, data)
    path = folder / LEDGER
    try:
        with closing(sqlite3.connect(read_only_uri(path), uri=True, isolation_level=None)) as db:
            db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            if is_new(db, path):
                raise OperatorError(f"The ledger {path} has no tables. Name the folder of a run that has started.")
            attach_books(db, folder / TOKENS, read_only_uri)
            # Listed first: the ledger would not know a later checkpoint.
            checkpoints = sorted((folder / CHECKPOINTS).glob("step_*"))
            metrics = _begin(db, folder / "metrics.jsonl")
            yield AuditedRun(folder, settings, uids, db, metrics, checkpoints, rows_by_entry)
    except sqlite3.Error as error:
        raise OperatorError(
            f"The ledger {path} cannot be read: {error}. While {LEDGER}-wal is beside it, this user must be allowed to "
            "write in the folder; a ledger that is damaged is put back by resuming the run from a checkpoint."
        ) from None


def _begin(db: sqlite3.Connection, metrics: Path) -> bytes:
    """Begin the read transaction while no step is being recorded; returns the metrics of that moment.

    After 100 tries the metrics may be a few lines ahead.
    """
    for _ in range(_MAX_MOMENTS):
        before = _read(metrics)
        db.execute("BEGIN")
        db.execute("SELECT COUNT(*) FROM meta").fetchone()  # a transaction's view begins with its first read
        if (after := _read(metrics)) == before:
            break
        db.execute("ROLLBACK")
    else:
        db.execute("BEGIN")
    return after


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _read_uids(folder: Path, settings: Settings, data: Path | None) -> tuple[list[str], list[int]]:
    """Return the prompts' uids, and the number of prompts of each entry of data.train."""
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
