"""Writes a run's metrics lines for TensorBoard, when report.tensorboard is true."""

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError

_log = logging.getLogger("learner.live.tensorboard_log")
_FOLDER = "tensorboard"


class TensorboardLog:
    """Event files in the run folder. A failed write is logged once, and ends them."""

    def __init__(self, folder: Path) -> None:
        """Raises: SettingsError when the package is missing."""
        self.where = f"TensorBoard: tensorboard --logdir {folder / _FOLDER}"
        self._started_at = time.time()
        self._folder = folder / _FOLDER
        self._open = import_writer()
        self._writer: Any = None
        self._has_failed = False

    def log(self, line: Mapping[str, float]) -> None:
        """Write a line of this start. It replaces the steps that an earlier start took from here on.

        An evaluation's figures are at the step that it scored: a later step's line may have them.
        """
        if self._has_failed or line.get("at_s", self._started_at) < self._started_at:
            return
        step = int(line["step"])
        scored = int(line.get("eval/step", step))
        try:
            if self._writer is None:
                self._writer = self._open(str(self._folder), purge_step=step)
            for key, value in line.items():
                place = scored if key.startswith("eval/") else step
                self._writer.add_scalar(key, value, place, walltime=line.get("at_s"))
        except Exception as error:  # the run continues without it
            self._has_failed = True
            _log.warning('tensorboard failed  last="%s" consequence="metrics are in metrics.jsonl only"', error)

    def alert(self, title: str, text: str) -> None:
        """Write nothing: TensorBoard has no alerts."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full
            if self._writer is not None:
                self._writer.close()


def import_writer() -> Any:
    """Return the writer of event files. Raises: SettingsError when its package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SettingsError(
            f"settings: report.tensorboard is true, and its package cannot be imported ({error}). Install it with "
            "pip install tensorboard, or set report.tensorboard to false."
        ) from None
    return SummaryWriter
