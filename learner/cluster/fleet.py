"""Calls of a run's command to the fleet of rollout servers."""

import contextlib
from typing import Any

import ray

from learner.cluster.ray_door import CALL_S, RETRY_S, call
from protocol.errors import NeighbourError, OperatorError
from protocol.node.identity import FLEET_ROOMS, code_digest
from protocol.ray_calls import FLEET, NAMESPACE
from protocol.settings.run_spec import RunSpec
from protocol.waits import until

_WAIT_ANSWER_S = 2.0
# Ray ends the processes of a killed command within seconds.
_LAST_RUN_S = 20.0


def renew_fleet() -> bool:
    """Restart a fleet that runs other code than this checkout; warm servers with this code stay.

    Returns whether that was needed. Raises: OperatorError when a run uses its processes, or when it comes back with
    other code; NeighbourError when it does not come back.
    """
    code, before = code_digest(FLEET_ROOMS), call(find_fleet().describe_self.remote(), "the fleet")
    if before["code"] == code:
        return False
    if before["is_lending"]:
        raise OperatorError(
            "The code has changed since the cluster's fleet was started, and another run is using that fleet. "
            "Wait until the run has ended; this command then restarts the fleet."
        )
    ray.kill(find_fleet(), no_restart=False)  # Ray restarts it in a new process, which imports the present code
    now = _await_restarted_fleet(before["pid"])
    if now["code"] != code:
        raise OperatorError(
            f"The fleet on the cluster's head node runs other code than this checkout (digest {now['code']}, here "
            f"{code}). Bring both to the same version, or start the run on the head node."
        )
    return True


def await_idle_fleet() -> None:
    """Return once no run uses the fleet's processes; those of a killed command end a moment after it.

    Raises: OperatorError when one does: it belongs to another machine's command.
    """
    for _ in until(_LAST_RUN_S, RETRY_S):
        if not call(find_fleet().describe_self.remote(), "the fleet")["is_lending"]:
            return
    servers = call(find_fleet().describe.remote(), "the fleet")
    names = sorted({server["run"]["run_id"] for server in servers if server.get("run")})
    raise OperatorError(
        f"Another machine's run ({', '.join(names) or 'not attached yet'}) is using this cluster. "
        "Wait for its end, or end it there with Ctrl-C."
    )


def await_fleet() -> None:
    """Return once the fleet answers. Ray restarts a fleet that ended.

    Raises: NeighbourError after 30 s without an answer; OperatorError when the cluster has no fleet for as long.
    """
    for left_s in until(CALL_S, RETRY_S):
        try:
            call(find_fleet().describe_self.remote(), "the fleet")
            return
        except (NeighbourError, OperatorError):
            if left_s <= 0:
                raise


def describe_wait(longest_s: float) -> str:
    """Return the fleet's longest wait for a server in brackets; empty when it does not answer.

    longest_s: seconds since this start of the run.
    """
    with contextlib.suppress(NeighbourError, OperatorError):
        wait = call(find_fleet().describe_wait.remote(longest_s), "the fleet", _WAIT_ANSWER_S)
        return f" ({wait})" if wait else ""
    return ""


def be_admitted(coordinator: Any) -> None:
    """Reserve the cluster for this run while its coordinator lives. Before that the run touches no server.

    Raises: OperatorError naming a run that began at the same moment.
    """
    call(find_fleet().admit.remote([coordinator]), "the fleet", 60.0)


def check_services(spec: RunSpec, row: dict[str, Any] | None) -> dict[str, str]:
    """Have the fleet call every reward endpoint and the retriever, before anything slow starts.

    row: prompt, label and columns of the first data row; None: the run has no data.train.
    Returns the digests of the search index and of the MCP servers' tools, by their names for the user.
    """
    asking = find_fleet().check_services.remote(spec.model_dump(mode="json"), row)
    found: dict[str, str] = call(asking, "the fleet", 60.0)
    return found


def find_fleet() -> Any:
    """Return the fleet's handle. Raises: OperatorError when the cluster has none."""
    try:
        return ray.get_actor(FLEET, namespace=NAMESPACE)
    except ValueError:
        raise OperatorError("The cluster has no fleet. Run sluice start again: it starts the missing parts.") from None


def _await_restarted_fleet(old_pid: int) -> Any:
    """Return the new process's description of itself. Raises: NeighbourError after 30 s."""
    for _ in until(CALL_S, RETRY_S):
        with contextlib.suppress(NeighbourError):  # between the two processes
            now = call(find_fleet().describe_self.remote(), "the fleet")
            if now["pid"] != old_pid:
                return now
    raise NeighbourError("the fleet", f"did not restart within {CALL_S:g} s")
