"""Sends a run's metrics lines to Weights & Biases, when the settings name a project.

Only a thread of its own imports and calls wandb: a slow or absent service never delays a step. WANDB_MODE=offline and
=disabled work as wandb defines them.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learner.disk.run_folder import WANDB_ID, MetricsReader, main_set, read_answers
from protocol.disk.files import replace_file

_log = logging.getLogger("learner.live.wandb_log")
_INIT_S = 60.0
_MAX_WAITING = 10_000
_MAX_ANSWERS = 64


class WandbLog:
    """One run's page. Only `close` waits; a failure is logged once, as a warning."""

    def __init__(self, project: str, run_name: str, settings: Mapping[str, Any], folder: Path) -> None:
        """folder: the run's, which has wandb's id of the page since its first start."""
        self._project, self._run_name, self._settings, self._folder = project, run_name, dict(settings), folder
        self._started_at = time.time()
        # Last step in the folder. The next step's line may have an earlier time: it waited for an evaluation.
        self._known_step = max(
            (line["step"] for line in MetricsReader(folder / "metrics.jsonl").new_lines()), default=-1
        )
        self._has_failed = False
        self._placed: set[str] = set()  # figures of evaluations that the page knows
        self.where = ""  # a sentence with the page's place and the next command; empty while there is no page
        self._lines: queue.Queue[dict[str, float] | tuple[str, str] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="wandb", daemon=True)
        self._thread.start()

    def log(self, line: Mapping[str, float]) -> None:
        """Queue a metrics line. The page ends when ten thousand lines wait: they must not fill the memory."""
        self._queue(dict(line))

    def alert(self, title: str, text: str) -> None:
        """Queue an alarm: wandb shows it on the page, and mails it if the user has asked for that there."""
        self._queue((title, text))

    def _queue(self, item: dict[str, float] | tuple[str, str]) -> None:
        if self._has_failed:
            return
        try:
            self._lines.put_nowait(item)
        except queue.Full:
            self._warn(f"{_MAX_WAITING} lines wait to be sent")

    def close(self, timeout_s: float = 30.0) -> None:
        """Send the queued lines and end the page; waits `timeout_s` at most."""
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + timeout_s
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            self._warn(f"{_MAX_WAITING} lines wait to be sent")
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"it did not end within {timeout_s:g} s")

    def _send_all(self) -> None:
        try:
            run, is_resumed = self._start()
            while (line := self._lines.get()) is not None:
                if isinstance(line, tuple):
                    run.alert(title=line[0], text=line[1], level="WARN")
                elif not (is_resumed and self._is_on_page(line)):
                    self._place_scores(run, line)
                    run.log({**line, **self._tables(line)})
            run.finish()
        except Exception as error:  # wandb is a neighbour: training continues without it
            self._warn(f"{type(error).__name__}: {error}")

    def _place_scores(self, run: Any, line: Mapping[str, float]) -> None:
        """Have an evaluation's figures drawn at the step that it scored: a later step's line may have them."""
        new = {key for key in line if key.startswith("eval/")} - self._placed if "eval/step" in line else set()
        for key in sorted(new):
            run.define_metric(key, step_metric="eval/step")
        self._placed |= new

    def _tables(self, line: Mapping[str, float]) -> dict[str, Any]:
        """Return the first answers of the evaluation that a line has, as a table of the page."""
        import wandb

        path, step = self._folder / "evaluations.jsonl", int(line.get("eval/step", line["step"]))
        if (held_out := main_set(line)) is None or not path.exists():
            return {}
        columns = ["step", "prompt", "label", "response", "reward", "is_greedy"]
        answers = read_answers(path, {step}, held_out)[step][:_MAX_ANSWERS]
        rows = [[getattr(each, name) for name in columns] for each in answers]
        return {"eval/answers": wandb.Table(columns=columns, data=rows)}

    def _is_on_page(self, line: Mapping[str, float]) -> bool:
        """Return whether an earlier start has sent the line: after a resume the reader returns those again."""
        is_old = line.get("at_s", self._started_at) < self._started_at
        return is_old and line["step"] <= self._known_step

    def _start(self) -> tuple[Any, bool]:
        """Return wandb's run, and whether it resumes an earlier start's page."""
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
            # wandb would ask at the terminal, below the live view, and wait for ever.
            raise PermissionError("no API key. Set WANDB_API_KEY, or WANDB_MODE=offline")
        path = self._folder / WANDB_ID
        earlier_id = path.read_text(encoding="utf-8").strip() if path.exists() else None
        run = wandb.init(
            project=self._project,
            name=self._run_name,
            id=earlier_id,
            resume="allow",
            dir=str(self._folder),
            config=self._settings,
            settings=wandb.Settings(console="off", silent=True, init_timeout=_INIT_S, finish_timeout=_INIT_S),
        )
        replace_file(path, f"{run.id}\n".encode())
        self.where = _where(run)
        # Steps repeated after a resume are logged again: wandb's own counter would reject the smaller step.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run, earlier_id is not None

    def _warn(self, problem: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning('wandb failed  last="%s" consequence="metrics are in metrics.jsonl only"', problem)


def _where(run: Any) -> str:
    if run.offline:
        return f"Weights & Biases page, kept here; send it with: wandb sync {run.settings.sync_dir}"
    return f"Weights & Biases: {run.url}" if run.url else ""
