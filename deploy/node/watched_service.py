"""One service of a node, watched: found running, found ended, started again with the surroundings that it had."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from deploy.node.processes import end, find, last_lines, launch, marked
from deploy.node.restarts import Restarts
from deploy.node.service_health import is_healthy
from protocol.errors import OperatorError
from protocol.node.home import ProcessRecord
from protocol.waits import until

_log = logging.getLogger("keeper")
# Fewer are not worth a word at once: the restart itself is the news.
_TELLING_ENDS = 3
_EXEC_S = 1.0
# Once it is well a service is asked less often than it is looked for.
_ASK_EVERY_S = 5.0
_TERM_S = 3.0


class WatchedService:
    """changed: told the new record after each start. Not safe for several threads: its watcher owns it."""

    def __init__(
        self, record: ProcessRecord, token_file: Path, changed: Callable[[ProcessRecord], None], silent_s: float
    ) -> None:
        self.record = record
        self.restarts = Restarts()
        self.trouble = ""  # why it is not well now, for the user; empty while it is
        self._token_file = token_file
        self._changed = changed
        self._silent_s = silent_s
        self._environment, self._folder = _surroundings(record)
        self._session = _session_of(record)
        self._started = time.monotonic()
        self._was_healthy = False
        self._ask_at = self._healthy_at = 0.0
        self._next_start: float | None = None
        self._is_told = True  # whether `changed` took the newest record

    def look(self) -> bool:
        """See whether it runs; returns whether it is time to `start` it. Blocks for a health question, 5 s at most."""
        if not self._is_told:
            self._tell()
        if find(self.record) is not None:
            self._note_running()
        elif self._next_start is None:
            self._note_end()
        return self._next_start is not None and time.monotonic() >= self._next_start

    def start(self) -> None:
        """Start it again, as it was started before."""
        # What a script had started lives on when the script was killed, and has the port.
        self._end_session()
        log = Path(self.record.log)
        # What the ended one said last is kept beside the new one's log, which begins empty.
        with contextlib.suppress(OSError):
            log.replace(log.with_suffix(".previous.log"))
        self._started, self._was_healthy, self._next_start = time.monotonic(), False, None
        self._ask_at = 0.0  # it may be well, and killed, before the next question to the process that ended
        record = self.record
        try:
            self.record = launch(
                record.name, record.command, record.code, log, self._environment, record.url or "", self._folder
            )
        except OperatorError as error:
            self.trouble = str(error)
            _log.error('service cannot be started  name=%s reason="%s"', record.name, error)
            return  # found ended at the next look, and tried again later
        self._session = _session_of(self.record)
        self.restarts.num_restarts += 1
        _log.warning("service started again  name=%s pid=%d", record.name, self.record.pid)
        self._tell()

    def _tell(self) -> None:
        """Have the new record written down; on a full disk at one of the next looks."""
        try:
            self._changed(self.record)
        except OSError as error:
            if self._is_told:
                _log.error('service is not written down  name=%s reason="%s"', self.record.name, error)
            self._is_told = False
        else:
            self._is_told = True

    def _note_running(self) -> None:
        """Ask it how it is, now and then; end it when it was well once and has not been for long."""
        now = time.monotonic()
        if now < self._ask_at:
            return
        try:
            is_well = is_healthy(self.record, self._token_file)
        except OperatorError as error:  # no token to ask with: it says nothing of the service
            self.trouble, self._healthy_at = str(error), now
            return
        if is_well:
            self._was_healthy, self.trouble = True, ""
            self._healthy_at, self._ask_at = now, now + min(_ASK_EVERY_S, self._silent_s)
        elif self._was_healthy and time.monotonic() - self._healthy_at > self._silent_s:
            _log.warning("service does not answer and is ended  name=%s silent_s=%g", self.record.name, self._silent_s)
            self._end_session()

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

    def _end_session(self) -> None:
        """End the service and all that it started."""
        session = self._session
        # The shell that led it ended at once: a process of this number is a stranger that begins another session.
        if session is None or psutil.pid_exists(session):
            return
        with contextlib.suppress(OperatorError):  # one that cannot be ended has its port: the next start says so
            end(marked(lambda process: os.getsid(process.pid) == session), _TERM_S)


def _session_of(record: ProcessRecord) -> int | None:
    """Return the session that a service's processes share, of their own since its start; None when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        session = os.getsid(record.pid) if find(record) is not None else None
        return session if session != os.getsid(0) else None
    return None


def _surroundings(record: ProcessRecord) -> tuple[dict[str, str], Path]:
    """Return environment and working folder of a running service: what it is started with again.

    Read from the process, so that no file of ours holds a copy of the user's environment. One that ended before
    anybody looked gets this process's own.
    """
    for _ in until(_EXEC_S, 0.01):  # just after the start the kernel shows no environment
        if (process := find(record)) is None:
            break
        with contextlib.suppress(psutil.Error, OSError):
            if environment := process.environ():
                return environment, Path(process.cwd())
    return dict(os.environ), Path.cwd()
