"""Run folders as the page shows them: read while they are written, each file from where the last reading ended."""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.data.text_decoder import TextDecoder
from learner.disk.run_folder import LEDGER, LOCK, LOGS, RECORDS, SETTINGS, MetricsReader, main_set
from learner.live.alarms import alarms_of
from learner.report.dash.ledger_rows import LedgerRows
from learner.report.dash.sample_index import SampleIndex
from learner.report.facts import settings_table
from protocol.disk.lock import is_locked
from protocol.errors import OperatorError, SettingsError
from protocol.settings.loader import load_saved_settings
from protocol.settings.settings import Settings

_LIVE_S = 60.0  # a run that wrote within this time is going
_DEPTH = 3  # folders of runs below RUNS_DIR
_TAIL_BYTES = 512 * 1024  # of each log
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]\d{3})\s?(.*)")
# Not the ledger's shared memory: a reader renews it.
_FILES = (SETTINGS, LEDGER, LOGS[0], *RECORDS)


@dataclass(frozen=True)
class RunSummary:
    """One run in the list."""

    name: str  # its folder below RUNS_DIR
    state: str  # done: all steps are there; going: its command lives, or it wrote within a minute; stopped; unreadable
    step: int  # last finished; 0: none
    max_steps: int | None  # None: the settings cannot be read
    reward: float | None  # mean of the newest step's samples
    held_out: float | None  # newest held-out score
    num_alarms: int
    changed_at: float  # Unix seconds of the newest write


class RunFolder:
    """One run's folder. Calls from any thread."""

    def __init__(self, name: str, path: Path, indexes: Path) -> None:
        """indexes: folder for the index of the run's samples."""
        self.name, self.path = name, path
        self.ledger = LedgerRows(path / LEDGER, indexes)
        self._paths = [path / file for file in _FILES]
        self._lock = threading.Lock()
        self._reader = MetricsReader(path / "metrics.jsonl")
        self._num_files = 0
        self._lines: list[dict[str, float]] = []
        self._settings: tuple[float, Settings | None, str] = (-1.0, None, "")
        self._decoder: TextDecoder | None = None
        self._figures: tuple[object, _Figures] = (None, _Figures([], None, None))
        self.samples = SampleIndex(path / "samples.jsonl", indexes)

    def lines(self) -> list[dict[str, float]]:
        """Return the metrics lines in step order. A step that a resume repeated counts once."""
        with self._lock:
            new = self._reader.new_lines()
            if self._reader.num_files != self._num_files:
                self._num_files = self._reader.num_files
                self._lines.clear()
            for line in new:
                while self._lines and self._lines[-1]["step"] >= line["step"]:
                    self._lines.pop()
                self._lines.append({sys.intern(key): value for key, value in line.items()})
            return list(self._lines)

    def settings(self) -> tuple[Settings | None, str]:
        """Return the settings, and why there are none."""
        path = self.path / SETTINGS
        changed_at = _mtime(path)
        with self._lock:
            if self._settings[0] != changed_at:
                try:
                    self._settings = changed_at, load_saved_settings(path), ""
                except (SettingsError, OSError) as error:
                    self._settings = changed_at, None, f"settings.yaml cannot be read: {error}"
            return self._settings[1:]

    def decoder(self) -> TextDecoder:
        """Return what makes texts of tokens: the newest checkpoint's tokenizer, or that of policy.model."""
        if self._decoder is None or self._decoder.problem is not None:  # the first checkpoint may be there now
            settings, _ = self.settings()
            saved = self.path / "checkpoints" / "latest" / "model"
            model = Path(settings.policy.model) if settings and settings.policy.model else None
            self._decoder = TextDecoder(saved if (saved / "tokenizer.json").exists() else model)
        return self._decoder

    def alarms(self) -> list[dict[str, Any]]:
        """Return the alarms so far: step and sentence."""
        return self._read_figures(self.lines(), self.settings()[0]).alarms

    def changed_at(self) -> float:
        """Return the Unix seconds of the newest write."""
        return max(map(_mtime, self._paths))

    def summary(self) -> RunSummary:
        try:
            lines, (settings, _), changed_at = self.lines(), self.settings(), self.changed_at()
        except OSError:
            return RunSummary(self.name, "unreadable", 0, None, None, None, 0, 0.0)
        step = int(lines[-1]["step"]) if lines else 0
        max_steps = settings.run.max_steps if settings else None
        is_done = bool(lines) and max_steps is not None and step >= max_steps
        is_going = time.time() - changed_at < _LIVE_S or is_locked(self.path / LOCK)
        state = "done" if is_done else "going" if is_going else "stopped"
        figures = self._read_figures(lines, settings)
        num_alarms = len(figures.alarms)
        return RunSummary(self.name, state, step, max_steps, figures.reward, figures.held_out, num_alarms, changed_at)

    def setting_rows(self) -> list[dict[str, Any]]:
        """Return every setting: name, value, and whether it differs from its default. Passwords are hidden."""
        settings, _ = self.settings()
        table = settings_table(settings) if settings else []
        return [{"name": name, "value": value, "is_changed": changed} for name, value, changed in table]

    def _read_figures(self, lines: Sequence[Mapping[str, float]], settings: Settings | None) -> "_Figures":
        now = (len(lines), lines[-1].get("at_s") if lines else None, id(settings))
        if self._figures[0] != now:
            found = alarms_of(lines, settings.health) if settings else []
            alarms = [{"step": step, "name": alarm.name, "text": alarm.text} for step, alarm in found]
            reward = _newest(lines, lambda line: "reward/mean")
            held_out = _newest(lines, lambda line: f"eval/{main_set(line)}/reward")
            self._figures = now, _Figures(alarms, reward, held_out)
        return self._figures[1]


@dataclass(frozen=True)
class _Figures:
    """What is computed from all lines of a run."""

    alarms: list[dict[str, Any]]
    reward: float | None
    held_out: float | None


class Runs:
    """All runs below a folder; new ones are found when the list is read."""

    def __init__(self, folder: Path, indexes: Path) -> None:
        """Raises: OperatorError when `folder` is not a folder."""
        if not folder.is_dir():
            raise OperatorError(f"{folder} is not a folder. Give a run's folder, or the folder of your runs.")
        self._folder, self._indexes = folder.resolve(), indexes
        self._runs: dict[str, RunFolder] = {}
        self._lock = threading.Lock()

    def all(self) -> list[RunFolder]:
        """Return the runs, newest write first."""
        with self._lock:
            for path in _run_folders(self._folder, self._folder, _DEPTH):
                name = self._folder.name if path == self._folder else str(path.relative_to(self._folder))
                name = name.encode("utf-8", "backslashreplace").decode()  # a folder's name may be any bytes
                if name not in self._runs:
                    self._runs[name] = RunFolder(name, path, self._indexes)
            self._runs = {name: run for name, run in self._runs.items() if os.path.isdir(run.path)}
            return sorted(self._runs.values(), key=RunFolder.changed_at, reverse=True)

    def get(self, name: str) -> RunFolder:
        """Return a run by its name. Raises: KeyError."""
        return self._runs[name] if name in self._runs else {run.name: run for run in self.all()}[name]


def _run_folders(folder: Path, root: Path, depth: int) -> Sequence[Path]:
    try:
        if (folder / SETTINGS).exists() or (folder / "metrics.jsonl").exists():
            return [folder]
        children = sorted(path for path in folder.iterdir() if path.is_dir()) if depth else []
        children = [path for path in children if not (path.is_symlink() and path.resolve().is_relative_to(root))]
    except OSError:  # a folder that may not be read, or has just gone
        return []
    return [found for child in children for found in _run_folders(child, root, depth - 1)]


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # not there, or in a folder that may not be read
        return 0.0


def _newest(lines: Sequence[Mapping[str, float]], key_of: Any) -> float | None:
    return next((line[key_of(line)] for line in reversed(lines) if key_of(line) in line), None)


def merged_logs(folder: Path, text: str = "", most: int = 500) -> list[dict[str, Any]]:
    """Return the newest entries with a text in them: time as it stands there, process and text, oldest first.

    A line without a time belongs to the entry before it.
    """
    paths = sorted(path for path in folder.rglob("*.log") if path.is_file()) if folder.is_dir() else []
    found = [entry for path in paths for entry in _read_log(path) if text.lower() in entry["text"].lower()]
    return sorted(found, key=lambda entry: str(entry["at"]))[-most:]


def _read_log(path: Path) -> list[dict[str, Any]]:
    try:
        return list(_entries(path))
    except OSError as error:
        return [{"at": "", "process": path.stem, "text": f"{path.name} cannot be read: {error.strerror}"}]


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        start = max(0, file.seek(0, 2) - _TAIL_BYTES)
        file.seek(start)
        lines = file.read().decode("utf-8", "replace").splitlines()[1 if start else 0 :]
    entry: dict[str, Any] | None = None
    for line in lines:
        if match := _STAMP.match(line):
            if entry is not None:
                yield entry
            at = match[1].replace("T", " ").replace(".", ",")
            entry = {"at": at, "process": path.stem, "text": match[2]}
        elif entry is not None:
            entry["text"] += f"\n{line}"
        else:
            entry = {"at": "", "process": path.stem, "text": line}
    if entry is not None:
        yield entry
