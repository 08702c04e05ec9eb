"""`start_cluster.sh --block`: the command stays until it is told to end, for what ends a node with its command.

srun, containers and systemd do: they take the end of the command for the end of its work.
"""

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from deploy.cluster.known import known_cluster, known_processes
from deploy.cluster.stop import stop
from deploy.node.processes import find
from protocol.errors import NeighbourError
from protocol.node.home import ClusterState, ProcessRecord

_LOOK_EVERY_S = 0.5
# Ray that ends sooner than this is not started again here: whoever keeps this command says how often.
_SHORT_S = 20.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def ignored_signals() -> list[signal.Signals]:
    """Return which of SIGTERM, SIGINT and SIGHUP this process ignores. Ask before Ray connects: it takes SIGTERM."""
    return [each for each in _ENDING if signal.getsignal(each) is signal.SIG_IGN]


def stay(ignored: Sequence[signal.Signals], goes_on: Callable[[ClusterState], bool]) -> bool:
    """Block until SIGTERM, SIGINT or SIGHUP comes, then stop this node's part of the cluster as stop_cluster.sh does.

    ignored: signals whose coming changes nothing: those that the starter had ignored, as nohup does, and a job script
        whose nodes must outlast the run. goes_on: whether the cluster does without Ray's process on this node.

    Returns True, also when somebody else has stopped it; False when Ray's process ended by itself, and the cluster goes
    on: the start is to be repeated. Raises: NeighbourError when that process ended and the cluster does not, or when it
    had run for less than 20 s.
    """
    told: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        told.append(number)

    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN if each in ignored else hear)
    print("Running until SIGTERM or Ctrl-C.", flush=True)
    while not told:
        time.sleep(_LOOK_EVERY_S)
        if "ray" not in (records := known_processes()):
            return True
        if find(records["ray"]) is None and not told:
            time.sleep(_LOOK_EVERY_S)  # a stop that is under way ends Ray before it removes cluster.json
            if (state := known_cluster()) is None:
                return True
            _say_repeated(records["ray"], goes_on(state))
            return False
    print(f"Told to end ({signal.Signals(told[0]).name}).", flush=True)
    stop([])
    return True


def _say_repeated(ray: ProcessRecord, goes_on: bool) -> None:
    """Raises: NeighbourError where repeating the start is of no use."""
    if not goes_on or time.time() - ray.started_at < _SHORT_S:
        raise NeighbourError("ray", f"its process ended; its logs are in {ray.log}")
    print(f"Ray's process ended; its logs are in {ray.log}.")
    print("The cluster's other nodes go on; what this one had is started again.", flush=True)
