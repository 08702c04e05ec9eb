"""The run that uses this cluster now, and the way to end it: SIGTERM to its command, as a user would.

Importing this module imports Ray, which reads its environment at once: call `connect_environment` first.
"""

import contextlib
from dataclasses import dataclass

import psutil

from deploy.cluster.fleet_client import describe_fleet, describe_servers
from deploy.cluster.known import ClusterInUse
from deploy.node.processes import has_ended
from protocol.errors import OperatorError
from protocol.node.current_run import current_run
from protocol.waits import until

# Longest wait for a step, its checkpoint and a last evaluation. The run has its own limit, run.drain_s.
_DRAIN_S = 1800.0
# Longest wait for the processes of a killed command, which end shortly after it.
_SETTLE_S = 20.0
_POLL_S = 0.2


@dataclass(frozen=True)
class AttachedRun:
    """A run whose command is still running."""

    name: str  # empty until a rollout server knows the run
    pid: int | None  # process of its command; None: it is on another node

    def __str__(self) -> str:
        if self.pid is None:
            return f"another machine's run ({self.name or 'not attached yet'})"
        return f"the run {self.name} (process {self.pid})"


def find_attached_run(timeout_s: float, settle_s: float = _SETTLE_S) -> AttachedRun | None:
    """Return the run that uses this cluster; None when no run does.

    A run of this node holds a lock file. Another node's run is known by what the fleet lends to it. The
    fleet also lends for a moment after a command of this node was killed, so that state must last for settle_s.

    timeout_s: longest wait for the fleet.
    Raises: OperatorError when the fleet does not answer.
    """
    for _ in until(settle_s, _POLL_S):
        if (run := current_run()) is not None:
            return AttachedRun(run.run_id, run.pid_here)
        fleet = describe_fleet(timeout_s)
        if fleet is None or not fleet["is_lending"]:
            return None
    names = []
    with contextlib.suppress(OperatorError):  # the fleet lends: there is a run, whose servers do not answer
        names = [server["run"]["run_id"] for server in describe_servers(timeout_s) if server.get("run")]
    return AttachedRun(names[0] if names else "", None)


def end_run(run: AttachedRun, command: str = "sluice stop") -> None:
    """End a run after its step; returns when it has saved and ended. command: the name that begins error messages.

    Raises: ClusterInUse when it runs elsewhere, or does not end.
    """
    if run.pid is None:
        raise ClusterInUse(
            f"{command}: {run} uses this cluster. End it there with Ctrl-C. sluice stop --now ends it too, "
            "and loses the steps after its last checkpoint."
        )
    try:
        process = psutil.Process(run.pid)
        process.terminate()
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        raise ClusterInUse(f"{command}: {run} belongs to another user, and only that user may end it.") from None
    # Polled: only a parent can wait for a process, and this one is not the parent.
    if not any(has_ended(process) for _ in until(_DRAIN_S, _POLL_S)):
        raise ClusterInUse(
            f"{command}: {run} has not ended within {_DRAIN_S:g} s of SIGTERM. See its output. sluice stop "
            "--now ends it, and loses the steps after its last checkpoint."
        )
