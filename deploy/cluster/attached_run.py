"""The run that uses this cluster now, and how it is told to end: as a user's SIGTERM tells it.

Importing this module imports Ray, which reads how to authenticate at once: set its environment first.
"""

import time
from dataclasses import dataclass

import psutil

from deploy.cluster.fleet_client import describe_fleet, describe_servers
from deploy.cluster.known import RunStays
from deploy.node.processes import has_ended
from protocol.node.current_run import current_run
from protocol.waits import until

# A step, its checkpoint and a last evaluation may all be under way; the command itself has a limit for its drain.
_DRAIN_S = 1800.0
# The processes of a command that was killed end a moment after it.
_LAST_RUN_S = 20.0
_POLL_S = 0.2


@dataclass(frozen=True)
class AttachedRun:
    """A run whose command still lives."""

    name: str  # empty while no rollout server knows of it
    pid: int | None  # of its command on this node; None: it runs on another

    def __str__(self) -> str:
        if self.pid is None:
            return f"another machine's run ({self.name or 'not attached yet'})"
        return f"the run {self.name} (process {self.pid})"


def find_attached_run(timeout_s: float) -> AttachedRun | None:
    """Return the run that uses this cluster. Blocks for 20 s more than timeout_s at most.

    Raises: OperatorError when the fleet does not answer.
    """
    deadline = time.monotonic() + _LAST_RUN_S
    while (run := current_run()) is None:
        fleet = describe_fleet(timeout_s)
        if fleet is None or not fleet["is_lending"]:
            return None
        if time.monotonic() > deadline:
            names = [server["run"]["run_id"] for server in describe_servers(timeout_s) if server.get("run")]
            return AttachedRun(names[0] if names else "", None)
        time.sleep(_POLL_S)
    return AttachedRun(run.run_id, run.pid_here)


def drain(run: AttachedRun, who: str = "stop_cluster") -> None:
    """Tell a run's command to end after its step; returns when it has saved and ended. who: the command that asks.

    Raises: RunStays when it runs elsewhere, or does not end.
    """
    if run.pid is None:
        raise RunStays(
            f"{who}: {run} uses this cluster. End it there with Ctrl-C, or lose what is in no checkpoint with "
            "deploy/stop_cluster.sh --now."
        )
    try:
        command = psutil.Process(run.pid)
        command.terminate()
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        raise RunStays(f"{who}: {run} belongs to another user, and may not be told to end.") from None
    if not any(has_ended(command) for _ in until(_DRAIN_S, _POLL_S)):  # it is no child of this process
        raise RunStays(
            f"{who}: {run} has not ended within {_DRAIN_S:g} s of being told to. See its output, or lose "
            "what is in no checkpoint with deploy/stop_cluster.sh --now."
        )
