"""The ledger's tables. A ledger of another version is refused."""

import sqlite3
from pathlib import Path

from protocol.errors import OperatorError

VERSION = 5

# Condition of the partial index: SQLite uses the index only for a query that repeats the condition word for word.
UNFINISHED = "state NOT IN ('trained', 'skipped')"

_TABLES = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (
    "group" TEXT PRIMARY KEY, epoch INTEGER NOT NULL, uid TEXT NOT NULL, position INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'leased', 'ready', 'assigned', 'trained', 'skipped')),
    server TEXT, attempt INTEGER NOT NULL, step INTEGER, reason TEXT, changed_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories (
    "group" TEXT NOT NULL, sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL, incarnation INTEGER NOT NULL,
    kind TEXT NOT NULL, is_greedy INTEGER NOT NULL, server TEXT NOT NULL, reward REAL NOT NULL,
    reward_parts TEXT NOT NULL, num_tokens INTEGER NOT NULL, num_model_tokens INTEGER NOT NULL,
    num_turns INTEGER NOT NULL, finish TEXT NOT NULL,
    oldest_version INTEGER NOT NULL, newest_version INTEGER NOT NULL, step INTEGER, staleness INTEGER,
    started_at REAL NOT NULL, finished_at REAL NOT NULL, received_at REAL NOT NULL, reward_score REAL,
    PRIMARY KEY ("group", sample_index));
CREATE TABLE IF NOT EXISTS events (at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS incarnations (
    number INTEGER PRIMARY KEY, started_at REAL NOT NULL, policy_version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS terms (
    from_step INTEGER NOT NULL, name TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (from_step, name));
CREATE TABLE IF NOT EXISTS failures (
    "group" TEXT NOT NULL, sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL, server TEXT NOT NULL,
    boundary TEXT NOT NULL, detail TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS waste (
    "group" TEXT NOT NULL, sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL, reason TEXT NOT NULL,
    num_tokens INTEGER NOT NULL, at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS prompts_unfinished ON prompts (position) WHERE {UNFINISHED};
CREATE INDEX IF NOT EXISTS failures_by_group ON failures ("group");
INSERT INTO meta VALUES ('schema', '{VERSION}') ON CONFLICT DO UPDATE SET value = excluded.value;
"""  # noqa: S608


def prepare_schema(db: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new ledger.

    Raises: OperatorError for a ledger of another version; sqlite3.Error for a file that is not a ledger.
    """
    if is_new(db, path):
        # Each statement may be repeated after a kill; the last one sets the version.
        db.executescript(_TABLES)


def is_new(db: sqlite3.Connection, path: Path) -> bool:
    """Return whether a ledger lacks its tables. Raises: OperatorError for a ledger of another version."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        return True
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is not None and (version := int(row[0])) != VERSION:
        writer = "Sluice 0.1.0" if version < VERSION else "the version of Sluice that wrote it"
        raise OperatorError(
            f"The ledger {path} has schema {version}, this version of Sluice knows {VERSION}. Use {writer}."
        )
    return row is None
