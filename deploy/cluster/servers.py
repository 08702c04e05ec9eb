"""`python -m deploy.cluster servers RUN +2`: more or fewer rollout servers for a run that goes on."""

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from protocol.disk.lock import locked
from protocol.errors import OperatorError, SettingsError
from protocol.node.current_run import CurrentRun, current_run
from protocol.node.scale_request import read_reply, write_request

# An engine of hundreds of GB loads for so long.
_START_S = 3600.0
_TAKEN_UP_S = 30.0
_POLL_S = 0.2
_LOCK = "servers.lock"


def change_servers(arguments: Sequence[str], taken_up_s: float = _TAKEN_UP_S) -> str:
    """Have a run use more or fewer rollout servers; returns what it says when that is done, and prints what until then.

    taken_up_s: within so many seconds the run says that it is at it.
    Raises: OperatorError when the run cannot, is not there, or does not answer.
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
        return _change(run, folder, change, taken_up_s)


@contextmanager
def _exclusive(lock: Path, name: str) -> Iterator[None]:
    """Let one command at a time change the servers of this run: a second request would replace the first.

    Raises: OperatorError when the folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            try:
                stack.enter_context(locked(lock))
            except BlockingIOError:
                print(f"Another command changes the servers of {name}; this one is next.", flush=True)
                stack.enter_context(locked(lock, wait_s=math.inf))
        except OSError as error:
            raise OperatorError(f"servers: {lock.parent} cannot be written: {error.strerror}.") from None
        yield


def _change(run: CurrentRun, folder: Path, change: int, taken_up_s: float) -> str:
    name, begun = run.run_id, time.monotonic()
    _check_goes_on(run)  # a wish that is left for another start of it would be done, and be told to nobody
    try:
        wish = write_request(folder, change)
    except OSError as error:
        raise OperatorError(f"servers: {folder} cannot be written: {error.strerror}.") from None
    said = ""  # of this wish; a later one's answer takes the place of it
    while True:
        answer = read_reply(folder)
        if answer is not None and answer.id == wish.id:
            if answer.is_refused:
                raise OperatorError(f"servers: {answer.text}")
            if answer.is_last:
                return answer.text
            if answer.text != said:
                print(answer.text, flush=True)
            said = answer.text
        _check_goes_on(run)
        if time.monotonic() - begun > (_START_S if said else taken_up_s):
            raise OperatorError(f"servers: the run {name} does not answer. It does once it trains; see its output.")
        time.sleep(_POLL_S)


def _check_goes_on(run: CurrentRun) -> None:
    """Raise OperatorError where this run's command has ended."""
    if (now := current_run()) is None or now.pid != run.pid:
        raise OperatorError(f"servers: the run {run.run_id} has ended.")
