"""The recorded samples of a run: an index of samples.jsonl, and single samples with their tokens.

The index is an SQLite file outside of the run folder: a folder that cannot be written is shown too. It holds the place
of each line and the words of its text. It grows with the file, from where the last reading ended.
"""

import hashlib
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from learner.data.text_decoder import TextDecoder

_TABLES = """
CREATE TABLE IF NOT EXISTS samples (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, "group" TEXT NOT NULL, sample_index INTEGER NOT NULL,
    start INTEGER NOT NULL, length INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_group ON samples ("group", sample_index);
CREATE INDEX IF NOT EXISTS by_step ON samples (step);
CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5 (words, content = '', detail = none);
CREATE TABLE IF NOT EXISTS place (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""
_VERSION = 2
_LINES_AT_ONCE = 5_000  # of one transaction
_MOST_TOKENS = 20_000  # of one sample on the page


class _Line(msgspec.Struct):
    """What the index takes from a line."""

    step: int
    group: str
    sample_index: int = -1  # lines of earlier versions have none
    prompt: str = ""
    response: str = ""


class SampleIndex:
    """One samples.jsonl. Calls from any thread; one of them indexes at a time."""

    def __init__(self, path: Path, indexes: Path) -> None:
        """indexes: folder for the index."""
        self._path = path
        name = hashlib.sha256(f"{path.resolve()} {_VERSION}".encode()).hexdigest()[:24]
        self.index = indexes / f"{name}.sqlite"
        self._lock = threading.Lock()

    def update(self) -> float:
        """Index the lines that are new; returns the share of the file that is indexed, 1 for all.

        Returns at once while another thread indexes.
        """
        size = self._path.stat().st_size if self._path.exists() else 0
        if self._lock.acquire(blocking=False):
            try:
                while self._read_some(size):
                    pass
            finally:
                self._lock.release()
        return min(1.0, self._place("end") / size) if size else 1.0

    def progress(self) -> float:
        """Return the share of the file that is indexed."""
        size = self._path.stat().st_size if self._path.exists() else 0
        return min(1.0, self._place("end") / size) if size else 1.0

    def of_group(self, group: str) -> list[dict[str, Any]]:
        """Return the recorded samples of a group: id, step and sample_index."""
        return self._rows('SELECT id, step, sample_index FROM samples WHERE "group" = ? ORDER BY id', group)

    def ids(self, groups: list[str]) -> dict[tuple[str, int], int]:
        """Return the ids of the recorded samples of these groups, by group and sample_index."""
        marks = ", ".join("?" * len(groups))
        rows = self._rows(f'SELECT id, "group", sample_index FROM samples WHERE "group" IN ({marks})', *groups)
        return {(row["group"], row["sample_index"]): row["id"] for row in rows}

    def neighbours(self, sample: int) -> tuple[int | None, int | None]:
        """Return the ids of the samples recorded before and after one."""
        ends = ("MAX(id) AS id FROM samples WHERE id <", "MIN(id) AS id FROM samples WHERE id >")
        before, after = (self._rows(f"SELECT {end} ?", sample)[0]["id"] for end in ends)
        return before, after

    def sample(self, sample: int, decoder: TextDecoder) -> dict[str, Any]:
        """Return a sample's line, with the text of each token. Raises: KeyError for an unknown id."""
        rows = self._rows("SELECT start, length FROM samples WHERE id = ?", sample)
        if not rows:
            raise KeyError(sample)
        with self._path.open("rb") as file:
            file.seek(rows[0]["start"])
            line: dict[str, Any] = msgspec.json.decode(file.read(rows[0]["length"]))
        num = len(line["tokens"])
        shown = line["tokens"][:_MOST_TOKENS]
        texts = decoder.token_texts(shown)
        before, after = self.neighbours(sample)
        return {**line, "texts": texts, "num_tokens": num, "problem": decoder.problem, "before": before, "after": after}

    def _read_some(self, size: int) -> bool:
        """Index some lines; returns whether there are more."""
        self.index.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self.index)) as db:
            db.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; {_TABLES}")
            places = dict(db.execute("SELECT name, value FROM place"))
            start, newest = places.get("end", 0), places.get("step", -1)
            inode = self._path.stat().st_ino if size else 0
            if start > size or inode != places.get("inode", inode):  # another file, as a resume makes it
                db.executescript("DROP TABLE samples; DROP TABLE texts; DELETE FROM place;" + _TABLES)
                start, newest = 0, -1
            num = 0
            for line_start, length, line in _lines(self._path, start):
                start = line_start + length
                if line is not None:
                    if line.step < newest:  # a resume repeats this step and those after it
                        db.execute("DELETE FROM samples WHERE step >= ?", (line.step,))
                    newest = line.step
                    row = (line.step, line.group, line.sample_index, line_start, length)
                    made = db.execute(
                        'INSERT INTO samples (step, "group", sample_index, start, length) VALUES (?, ?, ?, ?, ?)', row
                    )
                    words = f"{line.prompt} {line.response}"
                    db.execute("INSERT INTO texts (rowid, words) VALUES (?, ?)", (made.lastrowid, words))
                num += 1
                if num == _LINES_AT_ONCE:
                    break
            db.executemany(
                "INSERT OR REPLACE INTO place VALUES (?, ?)", [("end", start), ("step", newest), ("inode", inode)]
            )
            db.commit()
        return num == _LINES_AT_ONCE

    def _place(self, name: str) -> int:
        rows = self._rows("SELECT value FROM place WHERE name = ?", name)
        return rows[0]["value"] if rows else 0

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


def _lines(path: Path, start: int) -> Iterator[tuple[int, int, _Line | None]]:
    """Yield place, length and content of each whole line from `start` on; None: a line that a kill cut off."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        for text in file:
            if not text.endswith(b"\n"):
                return
            try:
                line = msgspec.json.decode(text, type=_Line)
            except msgspec.DecodeError:
                line = None
            yield start, len(text), line
            start += len(text)
