"""Receivers of metrics besides the view: health alarms, and the run's page at Weights & Biases."""

import time

from learner.live.alarms import HealthWatch
from learner.live.view import LiveView
from learner.live.wandb_log import WandbLog
from learner.run.start import RunStart
from protocol.settings.settings import Settings


class MetricsPages:
    """Call order: open, record for each line, close."""

    def __init__(self, settings: Settings, start: RunStart, view: LiveView) -> None:
        self._settings = settings
        self._start = start
        self._view = view
        self._health = HealthWatch(settings.health)
        self._started_at = time.time()
        self._wandb: WandbLog | None = None

    @property
    def where(self) -> str:
        """The page's address, as a sentence to follow another; empty without a page."""
        return "" if self._wandb is None else f" {self._wandb.where}"

    def open(self) -> None:
        """Begin the page, or continue the one in the run folder."""
        if (project := self._settings.report.wandb_project) is not None:
            given = self._settings.model_dump(mode="json")
            self._wandb = WandbLog(project, self._start.run_id, given, self._start.folder)

    def record(self, line: dict[str, float]) -> None:
        """Send a line of metrics to the page and raise its alarms."""
        if self._wandb is not None:
            self._wandb.log(line)
        for alarm in self._health.take(line) if "policy/loss" in line else ():
            if line.get("at_s", self._started_at) < self._started_at:
                continue  # an earlier start raised it
            self._view.message(f"Alarm at step {line['step']:.0f}: {alarm.text}")
            if self._wandb is not None:
                self._wandb.alert(f"{alarm.name} at step {line['step']:.0f}", alarm.text)

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.close()
