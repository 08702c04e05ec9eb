"""`python -m deploy.cluster servers RUN +2`: add rollout servers to a running run, or remove some."""

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from protocol.disk.lock import file_lock
from protocol.errors import OperatorError, SettingsError
from protocol.node.current_run import CurrentRun, current_run
from protocol.node.scale_request import read_reply, write_request

_START_S = 3600.0  # an engine of hundreds of GB
_REPLY_S = 30.0
_POLL_S = 0.2
_LOCK = "servers.lock"


def change_servers(arguments: Sequence[str], reply_s: float = _REPLY_S) -> str:
    """Request a change of a run's number of servers; prints the run's replies and returns the last one.

    reply_s: longest wait for the first reply.
    Raises: OperatorError when the run refuses, does not exist, or does not answer.
    """
    if len(arguments) != 2 or not re.fullmatch(r"[+-][0-9]{1,4}", arguments[1]):
        raise SettingsError("servers: give the run's name and how many more or fewer: servers my-run +2.")
    name, change = arguments[0], int(arguments[1])
    run = current_run()
    if run is None or run.run_id != name:
        there = f"{run.run_id} uses this cluster" if run is not None else "no run of this machine uses this cluster"
        raise OperatorError(f"servers: {there}. Give the command on the machine of the run's own command.")
    folder = Path(run.folder)
    with _exclusive(folder / _LOCK, name):
        return _change(run, folder, change, reply_s)


@contextmanager
def _exclusive(lock: Path, name: str) -> Iterator[None]:
    """Let one command at a time change the servers of this run: a second request would replace the first.

    Raises: OperatorError when the folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            try:
                stack.enter_context(file_lock(lock))
            except BlockingIOError:
                print(f"Another command changes the servers of {name}; this one is next.", flush=True)
                stack.enter_context(file_lock(lock, wait_s=math.inf))
        except OSError as error:
            raise OperatorError(f"servers: {lock.parent} cannot be written: {error.strerror}.") from None
        yield


def _change(run: CurrentRun, folder: Path, change: int, reply_s: float) -> str:
    name, begun = run.run_id, time.monotonic()
    _check_running(run)  # another start of the run would carry out a request that has no reader
    try:
        wish = write_request(folder, change)
    except OSError as error:
        raise OperatorError(f"servers: {folder} cannot be written: {error.strerror}.") from None
    shown = ""
    while True:
        answer = read_reply(folder)
        if answer is not None and answer.id == wish.id:
            if answer.is_refused:
                raise OperatorError(f"servers: {answer.text}")
            if answer.is_last:
                return answer.text
            if answer.text != shown:
                print(answer.text, flush=True)
            shown = answer.text
        _check_running(run)
        if time.monotonic() - begun > (_START_S if shown else reply_s):
            raise OperatorError(f"servers: the run {name} does not answer. It answers once it trains; see its output.")
        time.sleep(_POLL_S)


def _check_running(run: CurrentRun) -> None:
    """Raise OperatorError when the run's command has ended."""
    if (now := current_run()) is None or now.pid != run.pid:
        raise OperatorError(f"servers: the run {run.run_id} has ended.")
