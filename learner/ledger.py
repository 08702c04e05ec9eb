"""What became of every prompt and trajectory, in SQLite, in the run folder.

Written by the coordinator's thread alone; read by reports and audits. A prompt that was never leased has no row: the
position in the prompt order stands for all of them, so a run over a million prompts starts with an empty table.
"""

import contextlib
import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.whole_file import replace_file
from protocol.errors import OperatorError
from protocol.failpoints import failpoint
from protocol.trajectory import TrajectoryFacts

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (
    "group" TEXT PRIMARY KEY, epoch INTEGER NOT NULL, uid TEXT NOT NULL, position INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'leased', 'ready', 'assigned', 'trained', 'skipped')),
    server TEXT, attempt INTEGER NOT NULL, step INTEGER, reason TEXT, changed_at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS prompts_by_state ON prompts (state);
CREATE TABLE IF NOT EXISTS trajectories (
    "group" TEXT NOT NULL, sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL, incarnation INTEGER NOT NULL,
    kind TEXT NOT NULL, is_greedy INTEGER NOT NULL, server TEXT NOT NULL, reward REAL NOT NULL,
    reward_parts TEXT NOT NULL, num_tokens INTEGER NOT NULL, num_model_tokens INTEGER NOT NULL,
    num_turns INTEGER NOT NULL, finish TEXT NOT NULL,
    oldest_version INTEGER NOT NULL, newest_version INTEGER NOT NULL, step INTEGER, staleness INTEGER,
    started_at REAL NOT NULL, finished_at REAL NOT NULL, received_at REAL NOT NULL,
    PRIMARY KEY ("group", sample_index));
CREATE TABLE IF NOT EXISTS events (at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""


@dataclass(frozen=True)
class LeasedPrompt:
    """A prompt that was leased in an earlier life of the run and never trained: it goes out first."""

    group: str
    epoch: int
    uid: str
    position: int
    attempt: int


class Ledger:
    """Changes are collected in one transaction until `commit`: call it once per turn of the coordinator's loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._incarnations = path.with_name("incarnation")
        try:
            # Opened by the process's main thread, used by the coordinator's alone, closed after that has ended.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise OperatorError(
                f"The ledger {path} cannot be opened: {error}. Check the disk and the folder."
            ) from None

    def begin_incarnation(self) -> int:
        """Return how many times this run has started, this time included.

        The count stands beside the ledger too: a resume puts a checkpoint's ledger back, whose count is that of the
        checkpoint's day, and a start after it would take the number of one whose messages may still be under way.
        """
        known = [int(self.meta("incarnation") or 0)]
        if self._incarnations.exists():
            known.append(int(self._incarnations.read_text(encoding="utf-8")))
        incarnation = max(known) + 1
        self.set_meta("incarnation", str(incarnation))
        self.commit()
        # A death here gives the same number again, which no message has carried yet.
        failpoint("ledger.incarnation.committed")
        replace_file(self._incarnations, str(incarnation).encode())
        failpoint("ledger.incarnation.replaced")
        return incarnation

    def meta(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else None

    def set_meta(self, key: str, value: str) -> None:
        self._change("INSERT INTO meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", (key, value))

    def recall_unfinished(self) -> list[LeasedPrompt]:
        """Return the prompts that were out when the run stopped, oldest first; their state becomes pending."""
        rows = self._db.execute(
            'SELECT "group", epoch, uid, position, attempt FROM prompts '
            "WHERE state IN ('pending', 'leased', 'ready', 'assigned') ORDER BY position"
        ).fetchall()
        unfinished = "state IN ('leased', 'ready', 'assigned')"
        self._change(f"UPDATE prompts SET state = 'pending', changed_at = ? WHERE {unfinished}", (time.time(),))  # noqa: S608
        self._change("DELETE FROM trajectories WHERE step IS NULL AND kind = 'train'", ())
        self.commit()
        return [LeasedPrompt(*row) for row in rows]

    def lease(self, group: str, epoch: int, uid: str, position: int, server: str, attempt: int) -> None:
        self._change(
            "INSERT INTO prompts VALUES (?, ?, ?, ?, 'leased', ?, ?, NULL, NULL, ?) ON CONFLICT DO UPDATE SET "
            "state = 'leased', server = excluded.server, attempt = excluded.attempt, changed_at = excluded.changed_at",
            (group, epoch, uid, position, server, attempt, time.time()),
        )

    def set_state(self, groups: Sequence[str], state: str, step: int | None = None, reason: str | None = None) -> None:
        now = time.time()
        for group in groups:
            self._change(
                'UPDATE prompts SET state = ?, step = ?, reason = ?, changed_at = ? WHERE "group" = ?',
                (state, step, reason, now, group),
            )

    def add_trajectory(self, facts: TrajectoryFacts, incarnation: int) -> None:
        num_model_tokens = sum(span.end - span.start for span in facts.version_spans)
        self._change(
            f"INSERT OR REPLACE INTO trajectories VALUES ({', '.join('?' * 20)})",  # noqa: S608
            (
                facts.group, facts.sample_index, facts.attempt, incarnation, facts.kind, facts.is_greedy, facts.server,
                facts.reward, json.dumps(facts.reward_parts), facts.num_tokens, num_model_tokens, facts.num_turns,
                facts.finish, facts.oldest_version, facts.newest_version, None, None,
                facts.started_at, facts.finished_at, time.time(),
            ),
        )  # fmt: skip

    def forget_trajectories(self, group: str) -> None:
        """Drop what is known of a group whose samples are made again."""
        self._change('DELETE FROM trajectories WHERE "group" = ?', (group,))

    def mark_trained(self, groups: Sequence[str], step: int, policy_version: int) -> None:
        """Record that the groups are inside this step, which was taken on weights of `policy_version`."""
        self.set_state(groups, "trained", step)
        for group in groups:
            self._change(
                'UPDATE trajectories SET step = ?, staleness = ? - oldest_version WHERE "group" = ?',
                (step, policy_version, group),
            )

    def add_event(self, kind: str, detail: str) -> None:
        self._change("INSERT INTO events VALUES (?, ?, ?)", (time.time(), kind, detail))

    def commit(self) -> None:
        """Make what was changed survive the end of this process. Raises: OperatorError, as every change does."""
        if self._db.in_transaction:
            failpoint("ledger.commit.before")
            self._execute("COMMIT")
            failpoint("ledger.commit.after")

    def snapshot(self, path: Path) -> None:
        """Write a consistent copy of everything committed, as one file. Raises: OperatorError when it cannot be."""
        self.commit()
        failpoint("ledger.snapshot.begun")
        try:
            with contextlib.closing(sqlite3.connect(path)) as copy:
                self._db.backup(copy)
                failpoint("ledger.snapshot.copied")
                # The copy inherits the WAL mode: opened as it is, it would grow two more files inside a checkpoint.
                copy.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.Error as error:
            raise OperatorError(f"The ledger's copy {path} cannot be written: {error}. Check the disk.") from None
        failpoint("ledger.snapshot.after")

    def close(self) -> None:
        self.commit()
        self._db.close()

    def _change(self, statement: str, values: tuple[object, ...]) -> None:
        if not self._db.in_transaction:
            self._execute("BEGIN")
        self._execute(statement, values)

    def _execute(self, statement: str, values: tuple[object, ...] = ()) -> None:
        try:
            self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise OperatorError(
                f"The ledger {self._path} cannot be written: {error}. Free the disk, then run again."
            ) from None
