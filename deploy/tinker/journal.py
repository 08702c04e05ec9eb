"""The service's record on disk: requests in their order, results, models, saved weights and samplers.

A request is in the record before its client has an answer, and its result before the client can read it. One
transaction writes a result together with every change that the request made.
"""

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deploy.tinker.naming import second_request

_SCHEMA = """
CREATE TABLE IF NOT EXISTS request (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, seq INTEGER NOT NULL, verb TEXT NOT NULL, body BLOB NOT NULL,
    kind TEXT, result BLOB, digest BLOB, UNIQUE (owner, seq)
);
CREATE TABLE IF NOT EXISTS model (
    id TEXT PRIMARY KEY, form TEXT NOT NULL, seq INTEGER NOT NULL, step INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS saved (
    path TEXT PRIMARY KEY, place TEXT NOT NULL, form TEXT NOT NULL, step INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS sampler (
    id TEXT PRIMARY KEY, path TEXT NOT NULL, place TEXT NOT NULL, step INTEGER NOT NULL
);
"""
# Newest requests whose results are kept. A client reads a result within seconds.
_KEPT_RESULTS = 4096


Kind = Literal["json", "protobuf", "error"]


@dataclass(frozen=True)
class Request:
    """A client's request."""

    id: str
    owner: str  # model or sampling session
    seq: int  # place in the owner's order
    verb: str
    body: bytes


@dataclass(frozen=True)
class Result:
    """What the client gets."""

    kind: Kind  # form of the bytes; error: JSON
    content: bytes

    @classmethod
    def failure(cls, text: str, category: Literal["user", "server"]) -> "Result":
        """category: whose fault it is."""
        return cls("error", json.dumps({"error": text, "category": category}).encode())


@dataclass(frozen=True)
class ModelRow:
    """A client's model on the disk."""

    id: str
    form: str  # AdapterForm as JSON
    seq: int  # request whose state is on the disk
    step: int  # optimizer steps in it


@dataclass(frozen=True)
class SavedRow:
    """Weights that a client saved."""

    path: str  # tinker:// address
    place: str  # file or folder, below the service's folder
    form: str  # AdapterForm as JSON
    step: int  # optimizer steps in it


@dataclass(frozen=True)
class SamplerRow:
    """A sampling session."""

    id: str
    path: str  # tinker:// address of its weights; empty: the base model
    place: str  # folder of its adapter, below the service's folder; empty: the base model
    step: int  # optimizer steps in it


Row = ModelRow | SavedRow | SamplerRow
_PUT: dict[type[Row], str] = {
    ModelRow: "INSERT OR REPLACE INTO model VALUES (?, ?, ?, ?)",
    SavedRow: "INSERT OR REPLACE INTO saved VALUES (?, ?, ?, ?)",
    SamplerRow: "INSERT OR REPLACE INTO sampler VALUES (?, ?, ?, ?)",
}


class Journal:
    """The record. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)
        with suppress(sqlite3.OperationalError):  # it is there, unless an earlier version made the file
            self._db.execute("ALTER TABLE request ADD COLUMN digest BLOB")

    def add(self, request: Request) -> bool:
        """Write a request down; False when it came before, so that it is not run again.

        Raises: RequestError when another request has its place in the order.
        """
        digest = hashlib.sha256(request.verb.encode() + b"\0" + request.body).digest()
        with self._transaction():
            done = self._db.execute(
                "INSERT OR IGNORE INTO request (id, owner, seq, verb, body, digest) VALUES (?, ?, ?, ?, ?, ?)",
                (request.id, request.owner, request.seq, request.verb, request.body, digest),
            )
            (earlier,) = self._one("SELECT digest FROM request WHERE id = ?", request.id)
        if earlier not in (digest, None):  # None: of a journal without digests
            raise second_request(request.owner, request.seq)
        return done.rowcount == 1

    def finish(self, request: Request, result: Result, rows: Sequence[Row] = ()) -> None:
        """Write a result and the rows that the request made. A model's row ends the need for earlier bodies.

        The body that made the model stays: it has the client's metadata.
        """
        with self._transaction():
            for row in rows:
                self._put(row)
                if isinstance(row, ModelRow):
                    self._db.execute(
                        "UPDATE request SET body = x'' WHERE owner = ? AND seq BETWEEN 1 AND ?", (row.id, row.seq)
                    )
            values = (result.kind, result.content, request.id)
            self._db.execute("UPDATE request SET kind = ?, result = ? WHERE id = ?", values)
            if request.verb == "asample":
                self._db.execute("UPDATE request SET body = x'' WHERE id = ?", (request.id,))
            (number,) = self._one("SELECT rowid FROM request WHERE id = ?", request.id)
            oldest = (number - _KEPT_RESULTS,)
            self._db.execute("UPDATE request SET result = NULL WHERE rowid = ? AND kind IS NOT NULL", oldest)

    def put(self, row: Row) -> None:
        """Write a row, in place of an older one with its name."""
        with self._transaction():
            self._put(row)

    def check_sampler(self, row: SamplerRow) -> None:
        """Raises: RequestError when another sampling session has this one's name."""
        if self.sampler(row.id) not in (row, None):
            session, _, seq = row.id.rpartition(":sample:")
            raise second_request(f"The session {session}", seq)

    def result(self, request_id: str) -> Result | None:
        """Return a request's result; None while it has none. Raises: KeyError for an unknown or a very old request."""
        row = self._one("SELECT kind, result FROM request WHERE id = ?", request_id)
        if row is None or (row[0] is not None and row[1] is None):
            raise KeyError(request_id)
        return None if row[0] is None else Result(row[0], row[1])

    def has(self, name: str) -> bool:
        """Return whether a request with this name came, whatever its result."""
        return self._one("SELECT 1 FROM request WHERE id = ?", name) is not None

    def request(self, owner: str, seq: int) -> Request | None:
        """Return an unfinished request, or None."""
        query = "SELECT id, owner, seq, verb, body FROM request WHERE owner = ? AND seq = ? AND kind IS NULL"
        found = self._requests(query, owner, seq)
        return found[0] if found else None

    def open_requests(self, *, of_samples: bool) -> list[Request]:
        """Return the unfinished requests for samples, or all others, in order."""
        query = "SELECT id, owner, seq, verb, body FROM request WHERE kind IS NULL ORDER BY owner, seq"
        return [request for request in self._requests(query) if (request.verb == "asample") == of_samples]

    def finished_since(self, owner: str, seq: int, verb: str) -> list[Request]:
        """Return an owner's successful requests of a verb after `seq`, in order."""
        query = """SELECT id, owner, seq, verb, body FROM request
            WHERE owner = ? AND seq > ? AND verb = ? AND kind != 'error' ORDER BY seq"""
        return self._requests(query, owner, seq, verb)

    def next_seqs(self) -> dict[str, int]:
        """Return the next place in each owner's order."""
        with self._lock:
            rows = self._db.execute("SELECT owner, max(seq) + 1 FROM request WHERE kind IS NOT NULL GROUP BY owner")
            return dict(rows.fetchall())

    def model(self, model_id: str) -> ModelRow | None:
        row = self._one("SELECT * FROM model WHERE id = ?", model_id)
        return None if row is None else ModelRow(*row)

    def saved_weights(self, path: str) -> SavedRow | None:
        row = self._one("SELECT * FROM saved WHERE path = ?", path)
        return None if row is None else SavedRow(*row)

    def first_body(self, owner: str) -> bytes:
        """Return the body of the request that made a model; empty where it is not known."""
        row = self._one("SELECT body FROM request WHERE owner = ? AND seq = 0", owner)
        return b"" if row is None else row[0]

    def forget(self, path: str) -> SavedRow | None:
        """Remove saved weights from the record; returns their row."""
        with self._transaction():
            row = self.saved_weights(path)
            self._db.execute("DELETE FROM saved WHERE path = ?", (path,))
            return row

    def sampler(self, sampler_id: str) -> SamplerRow | None:
        row = self._one("SELECT * FROM sampler WHERE id = ?", sampler_id)
        return None if row is None else SamplerRow(*row)

    def _put(self, row: Row) -> None:
        self._db.execute(_PUT[type(row)], tuple(vars(row).values()))

    def _requests(self, query: str, *values: Any) -> list[Request]:
        with self._lock:
            return [Request(*row) for row in self._db.execute(query, values).fetchall()]

    def _one(self, query: str, *values: Any) -> Any:
        with self._lock:
            return self._db.execute(query, values).fetchone()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
