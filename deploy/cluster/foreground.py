"""`sluice start --block`: stay in the foreground until a signal arrives, as srun and systemd expect."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from deploy.cluster.known import known_processes
from deploy.cluster.stop import stop
from deploy.node.home import exclusive, this_home
from deploy.node.processes import find
from protocol.errors import NeighbourError, OperatorError

BLOCK = "--block"
_POLL_S = 0.5
_CLEANUP_S = 30.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def collect_signals() -> list[signal.Signals]:
    """Return a list to which SIGTERM, SIGINT and SIGHUP are appended as they arrive.

    A signal that the caller's process ignores stays ignored: nohup and job scripts rely on that.
    """
    received: list[signal.Signals] = []
    for each in _SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, frame: received.append(signal.Signals(number)))
    return received


def start_and_stay(arguments: Sequence[str]) -> None:
    """Start this node's part, block until a signal arrives, then stop it. A start in progress is ended too.

    Raises: as `run_start` and `stay` do.
    """
    received = collect_signals()
    # A separate process: a process that has imported Ray handles SIGTERM itself.
    # -P: the working folder may hold a deploy/ of the user.
    command = [sys.executable, "-uPm", "deploy.cluster", "start"]
    start = [*command, *(each for each in arguments if each != BLOCK)]
    run_start(start, received)
    if not received:
        stay(received)
    if received:
        print(f"Received {received[0].name}.", flush=True)
        stop([])


def run_start(command: Sequence[str], received: Sequence[signal.Signals]) -> None:
    """Run a start to its end, or until a signal arrives.

    Raises: SystemExit with the start's own status when it failed; NeighbourError when a signal killed it.
    """
    with subprocess.Popen(command) as start:  # noqa: S603  # our own module
        while not received and start.poll() is None:
            time.sleep(_POLL_S / 5)
        if received:
            start.terminate()
            try:
                start.wait(_CLEANUP_S)
            except subprocess.TimeoutExpired:  # a call that hangs inside Ray handles no signal
                start.kill()
    if received or not start.returncode:
        return
    if start.returncode < 0:
        raise NeighbourError("start", f"its process was ended by {signal.Signals(-start.returncode).name}")
    raise SystemExit(start.returncode)  # the start has printed its reason


def stay(received: Sequence[signal.Signals]) -> None:
    """Block until a signal arrives, or until another command has stopped this node's part of the cluster.

    Raises: NeighbourError when Ray's process ended by itself.
    """
    print("Running until SIGTERM or Ctrl-C.", flush=True)
    while not received:
        time.sleep(_POLL_S)
        if "ray" not in (records := known_processes()):
            return
        # A stop in progress ends Ray before it removes cluster.json.
        if find(records["ray"]) is None and not _is_changing() and known_processes() == records and not received:
            raise NeighbourError("ray", f"its process ended; its logs are in {records['ray'].log}")


def _is_changing() -> bool:
    """Return whether a start or stop of this node is under way."""
    try:
        with exclusive(this_home()):
            return False
    except OperatorError:
        return True
