"""Receivers of metrics besides the view: health alarms, reports, the live page, Weights & Biases and TensorBoard."""

import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from learner.live.alarms import HealthWatch
from learner.live.tensorboard_log import TensorboardLog
from learner.live.view import LiveView
from learner.live.wandb_log import WandbLog
from learner.report.write import write_report
from learner.run.start import RunStart
from protocol.settings.settings import Settings

if TYPE_CHECKING:
    from learner.report.dash.command import PageOfRun

_REPORT_S = 60.0


class MetricsPages:
    """Call order: open, record for each line, close."""

    def __init__(self, settings: Settings, start: RunStart, view: LiveView, model: Path) -> None:
        """model: folder with the tokenizer of the report's samples."""
        self._settings = settings
        self._start = start
        self._view = view
        self._model = model
        self._health = HealthWatch(settings.health)
        self._started_at = time.time()
        self._pages: list[WandbLog | TensorboardLog] = []
        # One thread writes all reports: each new one would have, and keep, a heap of its own.
        self._reporter: threading.Thread | None = None
        self._wanted = SimpleQueue[bool]()  # True: a report; False: no other one comes
        self._dash: PageOfRun | None = None

    @property
    def closing_lines(self) -> list[str]:
        """The alarms that hold, and the pages' places, a sentence each."""
        return [text for text in (self._health.summary, *(page.where for page in self._pages)) if text]

    def open(self) -> None:
        """Begin the pages, or continue those of the run folder."""
        report, folder = self._settings.report, self._start.folder
        if report.wandb_project is not None:
            given = self._settings.model_dump(mode="json")
            self._pages.append(WandbLog(report.wandb_project, self._start.run_id, given, folder))
        if report.tensorboard:
            self._pages.append(TensorboardLog(folder))
        if report.dash:
            from learner.report.dash.command import PageOfRun  # imports a web framework

            self._dash = PageOfRun(folder)
            self._view.message(f"Live page: {self._dash.link}", "INFO")

    def record(self, line: dict[str, float]) -> None:
        """Send a line of metrics to the pages, raise its alarms, and write the report after an evaluation."""
        for page in self._pages:
            page.log(line)
        is_old = line.get("at_s", self._started_at) < self._started_at  # an earlier start has raised its alarms
        alarms = self._health.take(line) if "policy/loss" in line else []
        for alarm in [] if is_old else reversed(alarms):  # a small panel shows the last message only
            self._view.message(f"Alarm at step {line['step']:.0f}: {alarm.text}")
            for page in self._pages:
                page.alert(f"{alarm.name} at step {line['step']:.0f}", alarm.text)
        if any(key.startswith("eval/") for key in line) and not is_old and self._wanted.empty():
            self._wanted.put(True)
            if self._reporter is None:
                self._reporter = threading.Thread(target=self._write_reports, name="report", daemon=True)
                self._reporter.start()

    def close(self) -> None:
        if self._reporter is not None:
            self._wanted.put(False)
            self._reporter.join(_REPORT_S)
        for page in (*self._pages, *([self._dash] if self._dash else [])):
            page.close()

    def _write_reports(self) -> None:
        while self._wanted.get():
            try:
                write_report(self._start.folder, self._model)
            except Exception as error:  # the run continues without it; the end writes another
                self._view.message(f"report.html could not be written: {error}")
