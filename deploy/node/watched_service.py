"""One service of a node, watched: found running, found ended, started again with the surroundings that it had."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from deploy.node.processes import find, last_lines, launch
from deploy.node.restarts import Restarts
from deploy.node.service_health import is_healthy
from protocol.errors import OperatorError
from protocol.node.home import ProcessRecord

_log = logging.getLogger("keeper")
# Fewer are not worth a word at once: the restart itself is the news.
_TELLING_ENDS = 3
_EXEC_S = 1.0


class WatchedService:
    """changed: told the new record after each start. Not safe for several threads: its watcher owns it."""

    def __init__(self, record: ProcessRecord, token_file: Path, changed: Callable[[ProcessRecord], None]) -> None:
        self.record = record
        self.restarts = Restarts()
        self.trouble = ""  # why it is not well now, for the user; empty while it is
        self._token_file = token_file
        self._changed = changed
        self._environment, self._folder = _surroundings(record)
        self._started = time.monotonic()
        self._was_healthy = False
        self._next_start: float | None = None

    def look(self) -> bool:
        """See whether it runs; returns whether it is time to `start` it. Blocks for a health question, 5 s at most."""
        if find(self.record) is not None:
            self._note_running()
        elif self._next_start is None:
            self._note_end()
        return self._next_start is not None and time.monotonic() >= self._next_start

    def start(self) -> None:
        """Start it again, as it was started before."""
        log = Path(self.record.log)
        # What the ended one said last is kept beside the new one's log, which begins empty.
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        self._started, self._was_healthy, self._next_start = time.monotonic(), False, None
        record = self.record
        try:
            self.record = launch(
                record.name, record.command, record.code, log, self._environment, record.url or "", self._folder
            )
        except OperatorError as error:
            _log.error('service cannot be started  name=%s reason="%s"', record.name, error)
            return  # found ended at the next look, and tried again later
        self.restarts.num_restarts += 1
        _log.warning("service started again  name=%s pid=%d", record.name, self.record.pid)
        self._changed(self.record)

    def _note_running(self) -> None:
        if not self._was_healthy and is_healthy(self.record, self._token_file):
            self._was_healthy, self.trouble = True, ""

    def _note_end(self) -> None:
        delay_s = self.restarts.note_end(time.monotonic() - self._started, self._was_healthy)
        self._next_start = time.monotonic() + delay_s
        said = last_lines(Path(self.record.log))
        ends = self.restarts.num_quick_ends
        if ends >= _TELLING_ENDS:
            self.trouble = f"ended {ends} times in a row, each soon after its start; the end of its log: {said}"
        else:
            self.trouble = "ended and is started again"
        _log.warning(
            'service ended  name=%s pid=%d ends_in_a_row=%d restart_in_s=%g last="%s"',
            *(self.record.name, self.record.pid, ends, delay_s, said),
        )


def _surroundings(record: ProcessRecord) -> tuple[dict[str, str], Path]:
    """Return environment and working folder of a running service: what it is started with again.

    Read from the process, so that no file of ours holds a copy of the user's environment. One that ended before
    anybody looked gets this process's own.
    """
    deadline = time.monotonic() + _EXEC_S
    while (process := find(record)) is not None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error, OSError):
            if environment := process.environ():
                return environment, Path(process.cwd())
        time.sleep(0.01)  # started this moment: the kernel shows no environment yet
    return dict(os.environ), Path.cwd()
