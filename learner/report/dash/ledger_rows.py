"""Rows of a run's ledger for the page, read without a lock that the coordinator would wait for."""

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.disk.run_folder import TOKENS, read_only_uri
from learner.disk.token_books import TOTALS, attach_books

_NEWEST = 4_000  # trajectories behind the live figures
_RATE_S = 60.0
MOST_COUNTED = 1_000  # trajectories behind the first listed one: a count of all reads the whole ledger
_UNFINISHED = "state NOT IN ('trained', 'skipped')"  # word for word as in the ledger's partial index
_COLUMNS = (
    '"group", sample_index, attempt, incarnation, kind, is_greedy, server, reward, reward_parts, num_tokens, '
    "num_model_tokens, num_turns, finish, oldest_version, newest_version, step, staleness, started_at, finished_at, "
    "received_at"
)
# Orders of the list: name -> SQL. The newest come first without sorting.
ORDERS = {
    "newest": "rowid DESC",
    "oldest": "rowid",
    **{
        f"{name}_{end}": f"{name} {end}"
        for name in ("reward", "num_model_tokens", "staleness")
        for end in ("asc", "desc")
    },
}


@dataclass(frozen=True)
class Filter:
    """Which trajectories to list; None and empty texts filter nothing."""

    step: int | None = None
    group: str = ""
    kind: str = ""  # train or eval
    server: str = ""
    finish: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None  # of the model
    max_tokens: int | None = None

    def condition(self) -> tuple[str, list[object]]:
        """Return the SQL condition and its values."""
        parts = [
            ("step = ?", self.step),
            ('"group" = ?', self.group or None),
            ("kind = ?", self.kind or None),
            ("server = ?", self.server or None),
            ("finish = ?", self.finish or None),
            ("reward >= ?", self.min_reward),
            ("reward <= ?", self.max_reward),
            ("num_model_tokens >= ?", self.min_tokens),
            ("num_model_tokens <= ?", self.max_tokens),
        ]
        given = [(text, value) for text, value in parts if value is not None]
        return " AND ".join(text for text, _ in given) or "1", [value for _, value in given]


class LedgerRows:
    """Questions to one ledger. Without a ledger every answer is empty. Raises: sqlite3.Error for a broken one."""

    def __init__(self, path: Path, copies: Path) -> None:
        """copies: folder for the copy of a ledger that cannot be read where it is."""
        self._path, self._copies = path, copies
        self._books: dict[str, Any] = {}
        self._books_due = float("-inf")  # when they are counted again, monotonic seconds

    def trajectories(
        self, wanted: Filter, order: str, offset: int, limit: int, texts: tuple[Path, str] | None = None
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return how many trajectories the filter leaves, and `limit` of them.

        They are counted to one more than MOST_COUNTED behind `offset`.

        order: a key of ORDERS. texts: the index of recorded samples and a search in it; None: all trajectories.
        """
        condition, values = wanted.condition()
        with closing(self._connect()) as db:
            if texts is not None:
                index, search = texts
                db.execute("ATTACH ? AS recorded", (f"{index.as_uri()}?mode=ro",))
                found = "recorded.samples WHERE id IN (SELECT rowid FROM recorded.texts WHERE texts MATCH ?)"
                # Runs of earlier versions do not say which sample of a group a text is.
                condition += (
                    f' AND (("group", sample_index) IN (SELECT "group", sample_index FROM {found}) '
                    f'OR "group" IN (SELECT "group" FROM {found} AND sample_index < 0))'
                )
                values = [*values, search, search]
            some = f"SELECT 1 FROM trajectories WHERE {condition} LIMIT {offset + MOST_COUNTED + 1}"
            (total,) = db.execute(f"SELECT COUNT(*) FROM ({some})", values).fetchone()
            rows = _dicts(
                db,
                f"SELECT {_COLUMNS} FROM trajectories WHERE {condition} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?",
                [*values, limit, offset],
            )
        return total, _with_parts(rows)

    def story(self, group: str) -> dict[str, Any]:
        """Return a prompt's state, its trajectories, failed samples and wasted tokens."""
        of_group = 'WHERE "group" = ?'
        with closing(self._connect()) as db:
            prompt = _dicts(db, f"SELECT * FROM prompts {of_group}", [group])
            return {
                "prompt": prompt[0] if prompt else None,
                "trajectories": _with_parts(
                    _dicts(db, f"SELECT {_COLUMNS} FROM trajectories {of_group} ORDER BY sample_index", [group])
                ),
                "failures": _dicts(db, f"SELECT * FROM failures {of_group} ORDER BY at", [group]),
                "waste": _dicts(db, f"SELECT * FROM waste {of_group} ORDER BY at", [group]),
            }

    def first_start(self) -> float:
        """Return the Unix seconds of the run's first start, which no other run has; 0 before it."""
        with closing(self._connect()) as db:
            row = db.execute("SELECT MIN(started_at) FROM incarnations").fetchone()
        return float(row[0] or 0.0)

    def live(self) -> dict[str, Any]:
        """Return prompts by state, and of the newest trajectories the staleness and each server's load.

        tokens_per_s: over a minute, or less where the newest trajectories came in less.
        """
        newest = f"trajectories WHERE rowid > (SELECT MAX(rowid) FROM trajectories) - {_NEWEST}"
        with closing(self._connect()) as db:
            states = dict(db.execute(f"SELECT state, COUNT(*) FROM prompts WHERE {_UNFINISHED} GROUP BY state"))
            (prompts,) = db.execute("SELECT COUNT(*) FROM prompts").fetchone()
            first, latest = db.execute(f"SELECT MIN(received_at), MAX(received_at) FROM {newest}").fetchone()
            since = max(first or 0.0, (latest or 0.0) - _RATE_S)
            servers = _dicts(
                db,
                "SELECT server, MAX(newest_version) AS version, MAX(received_at) AS heard_at, COUNT(*) AS samples, "
                "SUM(CASE WHEN received_at > ? THEN num_model_tokens ELSE 0 END) / ? AS tokens_per_s "
                f"FROM {newest} GROUP BY server ORDER BY server",
                [since, max(1.0, (latest or 0.0) - since)],
            )
            staleness = db.execute(
                f"SELECT staleness, COUNT(*) FROM {newest} AND staleness IS NOT NULL AND kind = 'train' GROUP BY 1"
            ).fetchall()
            events = db.execute("SELECT at, kind, detail FROM events ORDER BY at DESC LIMIT 50").fetchall()
        finished = prompts - sum(states.values())
        return {
            "states": {**states, "finished": finished},
            "servers": servers,
            "staleness": [{"versions": versions, "samples": count} for versions, count in staleness],
            "events": [{"at": at, "kind": kind, "detail": detail} for at, kind, detail in events],
        }

    def books(self) -> dict[str, Any]:
        """Return every generated token by what became of it; counted in at most 2 % of the time, so they may be older.

        rows: what, num_tokens, trained ones first. num_generated: by the servers, which the rows add up to.
        """
        if not self._path.exists():  # the run is about to begin
            return {"at": time.time(), "num_generated": 0, "rows": []}
        if time.monotonic() >= self._books_due:
            begun = time.monotonic()
            with closing(self._connect()) as db:
                path = self._path.with_name(TOKENS)
                attach_books(db, self._readable(path) if path.exists() else path, read_only_uri)
                db.execute("BEGIN")  # both files at one moment
                rows = [{"what": what, "num_tokens": number} for what, number in db.execute(TOTALS)]
                (generated,) = db.execute("SELECT COALESCE(SUM(num_generated), 0) FROM books.sessions").fetchone()
            self._books = {"at": time.time(), "num_generated": generated, "rows": rows}
            self._books_due = time.monotonic() + max(1.0, 50.0 * (time.monotonic() - begun))
        return self._books

    def _connect(self) -> sqlite3.Connection:
        if not self._path.exists():
            raise FileNotFoundError(f"{self._path} is missing: nothing is known about prompts and trajectories.")
        return sqlite3.connect(read_only_uri(self._readable(self._path)), uri=True)

    def _readable(self, path: Path) -> Path:
        """Return a file, or a copy with its log: SQLite reads a log with a file next to it, which it would make."""
        log, shared = (path.with_name(f"{path.name}{ending}") for ending in ("-wal", "-shm"))
        if not log.exists() or shared.exists():
            return path
        state = [(each.stat().st_mtime_ns, each.stat().st_size) for each in (path, log)]
        name = hashlib.sha256(os.fsencode(path.resolve()) + str(state).encode()).hexdigest()[:24]
        target = self._copies / name
        if not target.exists():
            self._copies.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=self._copies))
            for each in (path, log):
                shutil.copy(each, made)
            with contextlib.suppress(OSError):  # another page has made it meanwhile
                made.rename(target)
        return target / path.name


def _with_parts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "reward_parts": json.loads(row["reward_parts"])} for row in rows]


def _dicts(db: sqlite3.Connection, query: str, values: Sequence[object]) -> list[dict[str, Any]]:
    found = db.execute(query, values)
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found]
