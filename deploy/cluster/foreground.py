"""`start_cluster.sh --block`: the command stays until it is told to end, for what ends a node with its command.

srun, containers and systemd do: they take the end of the command for the end of its work.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from deploy.cluster.known import known_cluster, known_processes
from deploy.cluster.stop import stop
from deploy.node.processes import find
from protocol.errors import NeighbourError
from protocol.node.home import ClusterState, ProcessRecord

BLOCK = "--block"
_LOOK_EVERY_S = 0.5
# Ray that ends sooner than this is not started again here: whoever keeps this command says how often.
_SHORT_S = 20.0
_CLEAR_UP_S = 30.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def hear_the_end() -> list[signal.Signals]:
    """Return what is filled with SIGTERM, SIGINT and SIGHUP as they come from now on.

    One that the starter had ignored stays ignored, as nohup has it, and a job script whose nodes must outlast the run.
    """
    told: list[signal.Signals] = []
    for each in _ENDING:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, frame: told.append(signal.Signals(number)))
    return told


def start_and_stay(arguments: Sequence[str], goes_on: Callable[[ClusterState], bool]) -> None:
    """Start this node's part, and block until SIGTERM, SIGINT or SIGHUP comes: also a start that is not at its end yet
    is ended then, and what there is of this node's part is stopped as stop_cluster.sh does.

    arguments: of the start. goes_on: whether the cluster does without Ray's process on this node; then the start is
    repeated. Raises: as `begin` and `stay` do.
    """
    told = hear_the_end()
    # In processes of their own: what has asked Ray cannot ask another raylet, and takes SIGTERM for itself.
    command = [sys.executable, "-u", "-m", "deploy.cluster", "start", *(each for each in arguments if each != BLOCK)]
    begin(command, told)
    while not told and not stay(told, goes_on):
        begin(again(command), told)
    if told:
        print(f"Told to end ({told[0].name}).", flush=True)
        stop([])


def again(command: Sequence[str]) -> list[str]:
    """Return the command of a start that is repeated: the nodes that it waited for may have left since."""
    return [*command, "--wait-nodes", "0"]


def begin(command: Sequence[str], told: Sequence[signal.Signals]) -> None:
    """Run a start to its end, or until this process is told to end.

    Raises: SystemExit when the start has failed; NeighbourError when it was ended.
    """
    with subprocess.Popen(command) as start:  # noqa: S603  # our own module
        while not told and start.poll() is None:
            time.sleep(_LOOK_EVERY_S / 5)
        if told:
            start.terminate()
            try:
                start.wait(_CLEAR_UP_S)
            except subprocess.TimeoutExpired:  # a call that stands still in Ray hears no signal
                start.kill()
    if told or not start.returncode:
        return
    if start.returncode < 0:
        raise NeighbourError("start", f"its process was ended by {signal.Signals(-start.returncode).name}")
    raise SystemExit(start.returncode)  # it has said why


def stay(told: Sequence[signal.Signals], goes_on: Callable[[ClusterState], bool]) -> bool:
    """Block until this process is told to end, or somebody else has stopped this node's part of the cluster: True.

    Returns False when Ray's process ended by itself, and the cluster goes on. goes_on: as `start_and_stay` takes it.
    Raises: NeighbourError when that process ended and the cluster does not, or when it had run for less than 20 s.
    """
    print("Running until SIGTERM or Ctrl-C.", flush=True)
    while not told:
        time.sleep(_LOOK_EVERY_S)
        if "ray" not in (records := known_processes()):
            return True
        if find(records["ray"]) is None and not told:
            time.sleep(_LOOK_EVERY_S)  # a stop that is under way ends Ray before it removes cluster.json
            if (state := known_cluster()) is None:
                return True
            is_repeated = goes_on(state)
            if not told:
                _say_repeated(records["ray"], is_repeated)
                return False
    return True


def _say_repeated(ray: ProcessRecord, goes_on: bool) -> None:
    """Raises: NeighbourError where repeating the start is of no use."""
    if not goes_on or time.time() - ray.started_at < _SHORT_S:
        raise NeighbourError("ray", f"its process ended; its logs are in {ray.log}")
    print(f"Ray's process ended; its logs are in {ray.log}.")
    print("The cluster's other nodes go on; what this one had is started again.", flush=True)
