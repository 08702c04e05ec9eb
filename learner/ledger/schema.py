"""The ledger's tables, and the upgrade of an older ledger."""

import json
import sqlite3
from pathlib import Path

from protocol.errors import OperatorError

# 1 had no `failures`, `waste`, `incarnations` and `terms`, and no version. 3 added numbered reward endpoints, which 5
# removed. 4 added `reward_score` in `trajectories`.
VERSION = 5

# Condition of the partial index: SQLite uses the index only for a query that repeats the condition word for word.
UNFINISHED = "state NOT IN ('trained', 'skipped')"

_TABLES = """
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
    started_at REAL NOT NULL, finished_at REAL NOT NULL, received_at REAL NOT NULL,
    PRIMARY KEY ("group", sample_index));
CREATE TABLE IF NOT EXISTS events (at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""

_TABLES_SINCE_2 = """
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
"""

_INDEXES = f"""
CREATE INDEX IF NOT EXISTS prompts_unfinished ON prompts (position) WHERE {UNFINISHED};
CREATE INDEX IF NOT EXISTS failures_by_group ON failures ("group");
DROP INDEX IF EXISTS prompts_by_state;
"""

_SET_VERSION = f"""
INSERT INTO meta VALUES ('schema', '{VERSION}') ON CONFLICT DO UPDATE SET value = excluded.value;
"""  # noqa: S608


def prepare_schema(db: sqlite3.Connection, path: Path) -> None:
    """Make the missing tables and columns. A ledger of this version is not changed.

    Raises: OperatorError for a ledger of a newer version; sqlite3.Error for a file that is not a ledger.
    """
    if schema_version(db, path) != VERSION:
        # Each statement may be repeated after a kill; the last one sets the version.
        db.executescript(_TABLES + _TABLES_SINCE_2 + _INDEXES)
        _remove_reward_sets(db)
        if not _has_column(db, "reward_score"):
            db.execute("ALTER TABLE trajectories ADD COLUMN reward_score REAL")
        db.executescript(_SET_VERSION)


def add_missing_tables_in_memory(db: sqlite3.Connection, path: Path) -> None:
    """Make empty temporary tables for those that an older ledger lacks, on a connection that only reads.

    Raises: OperatorError for a ledger of a newer version, or an empty one.
    """
    version = schema_version(db, path)
    if version == 0:
        raise OperatorError(f"The ledger {path} has no tables. Name the folder of a run that has started.")
    missing = _TABLES_SINCE_2 if version < 2 else ""
    db.executescript(missing.replace("CREATE TABLE", "CREATE TEMP TABLE"))


def _remove_reward_sets(db: sqlite3.Connection) -> None:
    """Remove the numbered endpoints of schema 3 and 4; `meta` keeps the newest, as `RewardsSettings.reward_source`."""
    if _has_column(db, "reward_set"):
        db.execute("ALTER TABLE trajectories DROP COLUMN reward_set")
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'reward_sets'").fetchone():
        return
    for (scoring,) in db.execute("SELECT scoring FROM reward_sets ORDER BY number DESC LIMIT 1").fetchall():
        newest = json.loads(scoring)
        used = [one for one in newest["endpoints"] if one["weight"] and not one.get("shadow")]
        names = ", ".join(f"{one['name']} {one['url']} weight {one['weight']:g}" for one in used)
        otherwise = "the environment alone" if newest["endpoints"] else "the service of the cluster"
        source = f"{names or otherwise}; {newest['combine']}"
        db.execute("INSERT OR REPLACE INTO meta VALUES ('reward_source', ?)", (source,))
    db.execute("DROP TABLE reward_sets")


def _has_column(db: sqlite3.Connection, name: str) -> bool:
    return any(column[1] == name for column in db.execute("PRAGMA table_info(trajectories)"))


def schema_version(db: sqlite3.Connection, path: Path) -> int:
    """Return the version of a ledger's tables, 0 for an empty one. Raises: OperatorError for a newer version."""
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "meta" not in tables:
        return 0
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    version = int(row[0]) if row else 1
    if version > VERSION:
        raise OperatorError(
            f"The ledger {path} has schema {version}, this version of Sluice knows {VERSION}. "
            "Use the version of Sluice that wrote it."
        )
    return version
