"""`start_cluster.sh --block`: the command stays until it is told to end, for what ends a node with its command.

srun, containers and systemd do: they take the end of the command for the end of its work.
"""

import signal
import time
from collections.abc import Sequence
from types import FrameType

from deploy.cluster.known import known_processes
from deploy.cluster.stop import stop
from deploy.node.processes import find
from protocol.errors import NeighbourError

_LOOK_EVERY_S = 0.5
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def ignored_signals() -> list[signal.Signals]:
    """Return which of SIGTERM, SIGINT and SIGHUP this process ignores. Ask before Ray connects: it takes SIGTERM."""
    return [each for each in _ENDING if signal.getsignal(each) is signal.SIG_IGN]


def stay(ignored: Sequence[signal.Signals]) -> None:
    """Block until SIGTERM, SIGINT or SIGHUP comes, then stop this node's part of the cluster as stop_cluster.sh does.

    ignored: signals whose coming changes nothing: those that the starter had ignored, as nohup does, and a job script
        whose nodes must outlast the run.

    Returns too when somebody else has stopped it. Raises: NeighbourError when Ray's process ended by itself.
    """
    told: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        told.append(number)

    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN if each in ignored else hear)
    print("Running until SIGTERM or Ctrl-C.", flush=True)
    while not told:
        time.sleep(_LOOK_EVERY_S)
        records = known_processes()
        if "ray" not in records:
            return
        if find(records["ray"]) is None and not told:
            time.sleep(_LOOK_EVERY_S)  # a stop that is under way ends Ray before it removes cluster.json
            if "ray" in known_processes():
                raise NeighbourError("ray", f"its process ended; its logs are in {records['ray'].log}")
    print(f"Told to end ({signal.Signals(told[0]).name}).", flush=True)
    stop([])
