"""The recorded samples of a run: an index of samples.jsonl, and single samples with their tokens.

The index is an SQLite file outside of the run folder: a folder that cannot be written is shown too. It holds the place
of each line and the words of its text. It grows with the file, from where the last reading ended.
"""

import hashlib
import io
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from learner.data.text_decoder import TextDecoder
from learner.disk.run_folder import SamplePlace, mark_at
from protocol.wire.trajectory import TimedCall

# An id is never used again: words of a sample that a resume has removed stay in `texts`, and find nothing.
_TABLES = (
    """CREATE TABLE IF NOT EXISTS samples (
    id INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER NOT NULL, "group" TEXT NOT NULL, sample_index INTEGER NOT NULL,
    start INTEGER NOT NULL, length INTEGER NOT NULL)""",
    'CREATE INDEX IF NOT EXISTS by_group ON samples ("group", sample_index)',
    "CREATE INDEX IF NOT EXISTS by_step ON samples (step)",
    "CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5 (words, content = '', detail = none)",
    "CREATE TABLE IF NOT EXISTS place (name TEXT PRIMARY KEY, value NOT NULL)",
)
_VERSION = 4
_WAIT_S = 60.0  # for another page that indexes the same file
_LINES_AT_ONCE = 5_000  # of one transaction
_MOST_TOKENS = 20_000  # of one sample on the page


_Number = Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)]  # SQLite holds no larger one


class _Line(msgspec.Struct):
    """What the index takes from a line."""

    step: _Number
    group: str
    sample_index: _Number = -1  # lines of earlier versions have none
    start: float = 0.0  # as in SamplePlace
    prompt: str = ""
    response: str = ""


class SampleIndex:
    """One samples.jsonl. Calls from any thread; one of them indexes at a time."""

    def __init__(self, path: Path, indexes: Path) -> None:
        """indexes: folder for the index."""
        self._path = path
        name = hashlib.sha256(os.fsencode(path.resolve()) + f" {_VERSION}".encode()).hexdigest()[:24]
        self.index = indexes / f"{name}.sqlite"
        self._lock = threading.Lock()
        self._indexed: tuple[int, int] | None = None  # size and time of the file when all of it was indexed

    def update(self) -> None:
        """Index the lines that are new. Returns at once while another thread indexes."""
        if self._lock.acquire(blocking=False):
            try:
                now = self._state()
                if now != self._indexed or not self.index.exists():
                    while self._read_some():
                        pass
                    self._indexed = now
            finally:
                self._lock.release()

    def progress(self) -> float:
        """Return the share of the file that is indexed, 1 for all."""
        size, _ = self._state()
        ends = self._rows("SELECT value FROM place WHERE name = 'end'")
        return (min(1.0, ends[0]["value"] / size) if size else 1.0) if ends else 0.0

    def has_begun(self) -> bool:
        """Return whether some of the file is indexed: before, nothing can be searched."""
        return bool(self._rows("SELECT 1 FROM place"))

    def of_group(self, group: str) -> list[dict[str, Any]]:
        """Return the recorded samples of a group: id, step and sample_index."""
        return self._rows('SELECT id, step, sample_index FROM samples WHERE "group" = ? ORDER BY id', group)

    def ids(self, groups: list[str]) -> dict[tuple[str, int], int]:
        """Return the ids of the recorded samples of these groups, by group and sample_index."""
        query = 'SELECT id, "group", sample_index FROM samples WHERE "group" IN (SELECT value FROM json_each(?))'
        rows = self._rows(query, json.dumps(groups))
        return {(row["group"], row["sample_index"]): row["id"] for row in rows}

    def after(self, sample: int, most: int) -> list[dict[str, Any]]:
        """Return the samples recorded after one: id, step, group and sample_index."""
        query = 'SELECT id, step, "group", sample_index FROM samples WHERE id > ? ORDER BY id LIMIT ?'
        return self._rows(query, sample, most)

    def neighbours(self, sample: int) -> tuple[int | None, int | None]:
        """Return the ids of the samples recorded before and after one."""
        ends = ("MAX(id) AS id FROM samples WHERE id <", "MIN(id) AS id FROM samples WHERE id >")
        before, after = (self._rows(f"SELECT {end} ?", sample)[0]["id"] for end in ends)
        return before, after

    def sample(self, sample: int, decoder: TextDecoder) -> dict[str, Any]:
        """Return a sample's line, with the text of each token. Raises: KeyError for an unknown id."""
        line = self.line(sample)
        num = len(line["tokens"])
        shown = line["tokens"][:_MOST_TOKENS]
        texts = decoder.token_texts(shown)
        before, after = self.neighbours(sample)
        return {**line, "texts": texts, "num_tokens": num, "problem": decoder.problem, "before": before, "after": after}

    def calls(self, sample: int) -> list[TimedCall]:
        """Return a sample's turns, tools and rewards with their times; none in a line of an earlier version."""
        return msgspec.convert(self.line(sample).get("calls", []), list[TimedCall])

    def line(self, sample: int) -> dict[str, Any]:
        """Return a sample's line. Raises: KeyError for an unknown id."""
        rows = self._rows("SELECT start, length FROM samples WHERE id = ?", sample)
        if not rows:
            raise KeyError(sample)
        with self._path.open("rb") as file:
            file.seek(rows[0]["start"])
            try:
                line: dict[str, Any] = msgspec.json.decode(file.read(rows[0]["length"]))
            except msgspec.DecodeError:  # another file since the last update
                raise KeyError(sample) from None
        return line

    def _read_some(self) -> bool:
        """Index some lines; returns whether there are more."""
        self.index.parent.mkdir(parents=True, exist_ok=True)
        file: BinaryIO = self._path.open("rb") if self._path.exists() else io.BytesIO()
        with file, closing(sqlite3.connect(self.index, _WAIT_S, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = OFF")
            db.execute("BEGIN IMMEDIATE")  # another page may be at the same place
            for table in _TABLES:
                db.execute(table)
            places = dict(db.execute("SELECT name, value FROM place"))
            end, newest = places.get("end", 0), SamplePlace(places.get("step", -1), places.get("start", 0.0))
            if mark_at(file, end) != places.get("mark", b""):  # another file, as a resume makes it
                db.execute("DELETE FROM samples")
                db.execute("INSERT INTO texts (texts) VALUES ('delete-all')")
                end, newest = 0, SamplePlace(-1, 0.0)
            num = 0
            for start, length, line in _lines(file, end):
                end = start + length
                if line is not None:
                    place = SamplePlace(line.step, line.start)
                    if place.repeats(newest):  # a resume repeats this step and those after it
                        db.execute("DELETE FROM samples WHERE step >= ?", (line.step,))
                    newest = place
                    _add(db, line, start, length)
                num += 1
                if num == _LINES_AT_ONCE:
                    break
            places = {"end": end, **newest._asdict(), "mark": mark_at(file, end)}
            db.executemany("INSERT OR REPLACE INTO place VALUES (?, ?)", places.items())
            db.execute("COMMIT")
        return num == _LINES_AT_ONCE

    def _state(self) -> tuple[int, int]:
        """Return size and time of the file; zeros without one."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return 0, 0
        return status.st_size, status.st_mtime_ns

    def _rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        if not self.index.exists():
            return []
        with closing(sqlite3.connect(f"{self.index.as_uri()}?mode=ro", uri=True)) as db:
            db.row_factory = sqlite3.Row
            try:
                return [dict(row) for row in db.execute(query, values)]
            except sqlite3.OperationalError as error:  # the first update has not made the tables yet
                if "no such table" in str(error):
                    return []
                raise


def search_of(text: str) -> str:
    """Return the search for samples that have all words of a text; empty without a word."""
    return " ".join(f'"{word}"' for word in re.findall(r"[^\W_]+", text))


def _add(db: sqlite3.Connection, line: _Line, start: int, length: int) -> None:
    row = (line.step, line.group, line.sample_index, start, length)
    made = db.execute('INSERT INTO samples (step, "group", sample_index, start, length) VALUES (?, ?, ?, ?, ?)', row)
    db.execute("INSERT INTO texts (rowid, words) VALUES (?, ?)", (made.lastrowid, f"{line.prompt} {line.response}"))


def _lines(file: BinaryIO, start: int) -> Iterator[tuple[int, int, _Line | None]]:
    """Yield place, length and content of each whole line from `start` on; None: a damaged line."""
    file.seek(start)
    for text in file:
        if not text.endswith(b"\n"):
            return
        try:
            line = msgspec.json.decode(text, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            line = None
        yield start, len(text), line
        start += len(text)
