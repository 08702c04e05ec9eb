"""One service of a node: its health, and its restarts with the command, environment and folder of its first start."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from deploy.node.processes import end, find, find_own_processes, last_lines, launch
from protocol.errors import OperatorError
from protocol.http.bearer import read_token
from protocol.node.home import ProcessRecord
from protocol.waits import until

_log = logging.getLogger("keeper")
_ASK_S = 5.0
_POLL_S = 0.05
_ENVIRONMENT_S = 1.0
_HEALTH_EVERY_S = 5.0  # pause between two health requests to a healthy service
_TERM_S = 3.0
_LOOP_ENDS = 3  # ends in a row that count as a crash loop
_LASTED_S = 60.0  # a healthy service that ran for longer starts a new row
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 60.0
_MAX_DELAY_AFTER_HEALTH_S = 4.0  # a service that had been healthy is worth another try soon


@dataclass
class Restarts:
    """Restarts of one service. A service that never becomes healthy is restarted after 0, 0.25, 0.5, 1 .. 60 s."""

    num_restarts: int = 0  # starts by the keeper
    num_ends: int = 0  # ends in a row; a healthy life of a minute begins a new row
    num_unhealthy_ends: int = 0  # newest ends in a row of processes that were never healthy

    def next_delay(self, lived_s: float, was_healthy: bool) -> float:
        """Record an end; returns the seconds until the next start."""
        if lived_s >= _LASTED_S and was_healthy:
            self.num_ends = 0
        self.num_ends += 1
        self.num_unhealthy_ends = 0 if was_healthy else self.num_unhealthy_ends + 1
        after_health = min(_backoff(self.num_ends), _MAX_DELAY_AFTER_HEALTH_S)
        return max(after_health, min(_backoff(self.num_unhealthy_ends), _MAX_DELAY_S))


class WatchedService:
    """A service that its keeper watches. One thread at a time may call it."""

    def __init__(
        self, record: ProcessRecord, token_file: Path, on_start: Callable[[ProcessRecord], None], silent_s: float
    ) -> None:
        """on_start: called with the new record after each restart. silent_s: limit without a healthy answer."""
        self.record = record
        self.restarts = Restarts()
        self.trouble = ""  # reason why it is not healthy; empty while it is
        self._token_file = token_file
        self._on_start = on_start
        self._silent_s = silent_s
        self._environment, self._folder = _surroundings(record)
        self._session = _session_of(record)
        self._started_at = time.monotonic()
        self._was_healthy = False
        self._ask_at = self._healthy_at = 0.0
        self._start_at: float | None = None  # when the ended service is started again
        self._is_saved = True  # whether on_start accepted the newest record

    def poll(self) -> bool:
        """Check the service; returns whether `start` is due. Blocks about 20 s where it hangs."""
        if not self._is_saved:
            self._save()
        if find(self.record) is not None:
            self._check_health()
        elif self._start_at is None:
            self._plan_restart()
        return self._start_at is not None and time.monotonic() >= self._start_at

    def start(self) -> None:
        """Start the service again."""
        self._end_session()  # children of a killed script may still hold the port
        log = Path(self.record.log)
        with contextlib.suppress(OSError):
            log.replace(log.with_suffix(".previous.log"))
        self._started_at, self._was_healthy, self._start_at = time.monotonic(), False, None
        self._ask_at = 0.0
        old = self.record
        try:
            self.record = launch(old.name, old.command, old.code, log, self._environment, old.url or "", self._folder)
        except OperatorError as error:  # the next poll finds it ended, and plans another start
            self.trouble = str(error)
            _log.error('service cannot be started  name=%s reason="%s"', old.name, error)
            return
        self._session = _session_of(self.record)
        self.restarts.num_restarts += 1
        _log.warning("service restarted  name=%s pid=%d", old.name, self.record.pid)
        self._save()

    def _save(self) -> None:
        """Report the new record; after a full disk the next poll tries again."""
        try:
            self._on_start(self.record)
        except OSError as error:
            if self._is_saved:  # logged once
                _log.error('service is not in cluster.json  name=%s reason="%s"', self.record.name, error)
            self._is_saved = False
        else:
            self._is_saved = True

    def _check_health(self) -> None:
        """Ask a running service for its health now and then; end it when it was healthy and is silent for too long."""
        now = time.monotonic()
        if now < self._ask_at:
            return
        try:
            is_well = is_healthy(self.record, self._token_file)
        except OperatorError as error:  # no token to ask with
            self.trouble, self._healthy_at = str(error), now
            return
        if is_well:
            self._was_healthy, self.trouble = True, ""
            self._healthy_at, self._ask_at = now, now + min(_HEALTH_EVERY_S, self._silent_s)
        elif self._was_healthy and time.monotonic() - self._healthy_at > self._silent_s:
            _log.warning("service does not answer and is ended  name=%s silent_s=%g", self.record.name, self._silent_s)
            self._end_session()
        elif not self.trouble:
            self.trouble = "it does not answer GET /health"

    def _plan_restart(self) -> None:
        delay_s = self.restarts.next_delay(time.monotonic() - self._started_at, self._was_healthy)
        self._start_at = time.monotonic() + delay_s
        last, ends = last_lines(Path(self.record.log)), self.restarts.num_ends
        self.trouble = "it ended and restarts"
        if ends >= _LOOP_ENDS:
            self.trouble = f"ended {ends} times in a row; the end of its log: {last}"
        _log.warning(
            'service ended  name=%s pid=%d ends_in_a_row=%d restart_in_s=%g last="%s"',
            *(self.record.name, self.record.pid, ends, delay_s, last),
        )

    def _end_session(self) -> None:
        """End the service and all that it started."""
        session = self._session
        # The shell that led the session ended at once: a process with its number now belongs to another session.
        if session is None or psutil.pid_exists(session):
            return
        with contextlib.suppress(OperatorError):  # a process that cannot be ended holds its port: the start reports it
            end(find_own_processes(lambda process: os.getsid(process.pid) == session), _TERM_S)


def await_healthy(record: ProcessRecord, token_file: Path, timeout_s: float) -> None:
    """Return when the service is healthy.

    Raises: OperatorError with the end of its log when it ended, or was not healthy within timeout_s.
    """
    for _ in until(timeout_s, _POLL_S):
        if is_healthy(record, token_file):
            return
        if find(record) is None:
            raise OperatorError(
                f"The {record.name} ended at its start: {last_lines(Path(record.log))} (log: {record.log})"
            )
    raise OperatorError(
        f"The {record.name} at {record.url} was not healthy within {timeout_s:g} s: "
        f"{last_lines(Path(record.log))} (log: {record.log}). Raise --start-timeout-s if it needs longer."
    )


def is_healthy(record: ProcessRecord, token_file: Path) -> bool:
    """Return whether the process runs and answers GET /health with 200.

    A retriever without GET /health, such as Search-R1's, gets an empty search instead.
    """
    if find(record) is None or record.url is None:
        return False
    headers = {"authorization": f"Bearer {read_token(token_file)}"}
    # Without trust_env=False the user's HTTP proxy would get requests for loopback addresses.
    with httpx.Client(timeout=_ASK_S, trust_env=False) as client:
        try:
            status = client.get(httpx.URL(record.url).join("/health")).status_code
            if status in (404, 405, 501) and record.name == "retriever":
                nothing = {"queries": [], "topk": 1, "return_scores": True}
                status = client.post(record.url, json=nothing, headers=headers).status_code
        except httpx.HTTPError:
            return False
    return status == 200


def _backoff(num_ends: int) -> float:
    """Return 0 for the first end, then 0.25, 0.5, 1 .. seconds; the exponent is bounded, so that no float overflows."""
    return 0.0 if num_ends < 2 else float(_FIRST_DELAY_S * 2 ** min(num_ends - 2, 16))


def _session_of(record: ProcessRecord) -> int | None:
    """Return the session id of a service's processes; None when it has ended or shares our own session."""
    with contextlib.suppress(ProcessLookupError):
        session = os.getsid(record.pid) if find(record) is not None else None
        return session if session != os.getsid(0) else None
    return None


def _surroundings(record: ProcessRecord) -> tuple[dict[str, str], Path]:
    """Return the environment and working folder of a running service, or this process's own when it has ended.

    They are read from the process: the user's environment has secrets, and no file of ours may hold them.
    """
    for _ in until(_ENVIRONMENT_S, 0.01):  # just after the start the kernel shows no environment
        if (process := find(record)) is None:
            break
        with contextlib.suppress(psutil.Error, OSError):
            if environment := process.environ():
                return environment, Path(process.cwd())
    return dict(os.environ), Path.cwd()
