"""Reads a run's folder into facts for the report.

A missing or unreadable file becomes a sentence in `RunFacts.notes`, never an error: the report of a killed run is the
one that is needed most.
"""

import math
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from learner.disk.run_folder import FILTERED, parse_metrics_line, read_only_uri
from protocol.errors import SettingsError
from protocol.settings.loader import describe_settings, load_saved_settings
from protocol.settings.settings import Settings

_NUM_REASONS = 20


@dataclass(frozen=True)
class LedgerFacts:
    """Counts from the ledger."""

    num_starts: int  # starts of the run; 0: unknown
    states: dict[str, int]  # state -> prompts; the filter's are "filtered", not "skipped"
    staleness: dict[int, int]  # policy versions -> trained trajectories
    finishes: dict[str, int]  # finish -> trained trajectories, most first
    reasons: list[tuple[str, int]]  # (reason, skipped prompts), most first, at most 20
    events: dict[str, int]  # kind -> events, most first
    failures: dict[str, int]  # what failed -> samples that it failed
    rewards_since: int  # first step with the rewards of the present endpoints; 0: all steps have them


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run, without its sample trajectories."""

    name: str
    settings: Settings | None  # None: settings.yaml is missing, or of another version of the program
    lines: list[dict[str, float]]  # in step order; finite values only
    num_redone: int  # lines of steps that were repeated after a resume; not in `lines`
    ledger: LedgerFacts | None  # None: ledger.sqlite is missing or cannot be read
    notes: list[str]  # sentences about missing or broken files

    @property
    def reward_lines(self) -> list[dict[str, float]]:
        """Lines with a training reward of the newest step's reward endpoints."""
        since = self.ledger.rewards_since if self.ledger is not None else 0
        return [line for line in self.lines if "reward/mean" in line and line["step"] >= since]


def read_run(folder: Path) -> RunFacts:
    notes: list[str] = []
    settings = _read_settings(folder / "settings.yaml", notes)
    lines, num_redone = _read_metrics(folder / "metrics.jsonl", notes)
    ledger = _read_ledger(folder / "ledger.sqlite", notes)
    return RunFacts(folder.resolve().name, settings, lines, num_redone, ledger, notes)


def settings_table(settings: Settings) -> list[tuple[str, str, bool]]:
    """Return (name, value, differs from its default); passwords inside URLs are hidden."""
    return [
        (name, re.sub(r"//[^/@\s]+@", "//***@", value), changed) for name, value, changed in describe_settings(settings)
    ]


def _read_settings(path: Path, notes: list[str]) -> Settings | None:
    if not path.exists():
        notes.append("settings.yaml is missing: the settings of this run are not known.")
        return None
    try:
        return load_saved_settings(path)
    except SettingsError as error:
        notes.append(f"settings.yaml is from another version of the program: {error}")
        return None


def _read_metrics(path: Path, notes: list[str]) -> tuple[list[dict[str, float]], int]:
    """Return the lines in step order. After a resume at step n the later steps are repeated: the later line counts."""
    if not path.exists():
        notes.append("metrics.jsonl is missing: no step had ended when the run stopped.")
        return [], 0
    parsed = [parse_metrics_line(text) for text in path.read_bytes().splitlines()]
    if num_broken := sum(line is None for line in parsed):
        notes.append(f"metrics.jsonl has {num_broken} broken line(s), left out (a kill cuts a line off).")
    lineage: list[dict[str, float]] = []
    num_redone = 0
    for line in parsed:
        if line is None:
            continue
        while lineage and lineage[-1]["step"] >= line["step"]:
            lineage.pop()
            num_redone += 1
        lineage.append({key: value for key, value in line.items() if math.isfinite(value)})
    if not lineage:
        notes.append("metrics.jsonl holds no step: the run stopped before its first one ended.")
    return lineage, num_redone


def _read_ledger(path: Path, notes: list[str]) -> LedgerFacts | None:
    if not path.exists():
        notes.append("ledger.sqlite is missing: nothing is known about prompts and single trajectories.")
        return None
    try:
        with closing(sqlite3.connect(read_only_uri(path), uri=True)) as db:
            return _query(db)
    except sqlite3.Error as error:
        notes.append(f"ledger.sqlite cannot be read ({error}): nothing is known about prompts and trajectories.")
        return None


def _query(db: sqlite3.Connection) -> LedgerFacts:
    trained = "FROM trajectories WHERE kind = 'train' AND step IS NOT NULL"
    meta = dict(db.execute("SELECT key, value FROM meta WHERE key IN ('incarnation', 'rewards_since_step')"))
    return LedgerFacts(
        num_starts=int(meta.get("incarnation", 0)),
        states=dict(
            db.execute(
                "SELECT CASE WHEN state = 'skipped' AND reason LIKE ? THEN 'filtered' ELSE state END AS fate, COUNT(*) "
                "FROM prompts GROUP BY fate",
                (f"{FILTERED}%",),
            )
        ),
        staleness=dict(db.execute(f"SELECT staleness, COUNT(*) {trained} GROUP BY staleness")),
        finishes=dict(db.execute(f"SELECT finish, COUNT(*) {trained} GROUP BY finish ORDER BY 2 DESC")),
        reasons=db.execute(
            "SELECT COALESCE(reason, ''), COUNT(*) FROM prompts WHERE state = 'skipped' "
            "AND COALESCE(reason, '') NOT LIKE ? GROUP BY 1 ORDER BY 2 DESC LIMIT ?",
            (f"{FILTERED}%", _NUM_REASONS),
        ).fetchall(),
        events=dict(db.execute("SELECT kind, COUNT(*) FROM events GROUP BY kind ORDER BY 2 DESC")),
        failures=dict(db.execute("SELECT boundary, COUNT(*) FROM failures GROUP BY boundary")),
        rewards_since=int(meta.get("rewards_since_step", 0)),
    )
