"""The fleet of rollout servers as a run's command asks it."""

import contextlib
from typing import Any

import ray

from learner.cluster.ray_door import CALL_S, RETRY_S, call
from protocol.errors import NeighbourError, OperatorError
from protocol.node.code_digest import FLEET_ROOMS, code_digest
from protocol.ray_calls import FLEET, NAMESPACE
from protocol.settings.run_spec import RunSpec
from protocol.waits import until

_SAYING_S = 2.0
# Ray ends what a killed command started within seconds.
_LAST_RUN_S = 20.0


def renew_fleet() -> bool:
    """Have a fleet that was started with other code than this be started anew; warm servers of this code stay.

    Returns whether that was needed. Raises: OperatorError when a run lives on processes that it lent, or when it comes
    back with other code again; NeighbourError when it does not come back.
    """
    code, before = code_digest(FLEET_ROOMS), call(find_fleet().describe_self.remote(), "the fleet")
    if before["code"] == code:
        return False
    if before["is_lending"]:
        raise OperatorError(
            "The code has changed since the cluster's fleet was started, and another run is using that fleet. "
            "Wait until the run has ended; this command then has the fleet start anew."
        )
    ray.kill(find_fleet(), no_restart=False)  # Ray starts it again: in a new process, which imports what is there now
    now = _await_other_fleet(before["pid"])
    if now["code"] != code:
        raise OperatorError(
            f"The fleet on the cluster's head node runs other code than this checkout (digest {now['code']}, here "
            f"{code}). Bring both to the same version, or start the run on the head node."
        )
    return True


def await_idle_fleet() -> None:
    """Return once no run lives on the fleet's processes: those of a command that was killed end a moment after it.

    Raises: OperatorError when a run does, which then belongs to another machine's command.
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
    """Return once the fleet answers: Ray restarts one that ended.

    Raises: NeighbourError when it does not come back; OperatorError when the cluster has none for as long.
    """
    for left_s in until(CALL_S, RETRY_S):
        try:
            call(find_fleet().describe_self.remote(), "the fleet")
            return
        except (NeighbourError, OperatorError):
            if left_s == 0:
                raise


def describe_wait() -> str:
    """Return which server the fleet waits for, in words to stand behind its name; empty when it does not say."""
    with contextlib.suppress(NeighbourError, OperatorError):
        said = call(find_fleet().describe_wait.remote(), "the fleet", _SAYING_S)
        return f" ({said})" if said else ""
    return ""


def be_admitted(coordinator: Any) -> None:
    """Be the run that uses this cluster while its coordinator lives; before that no server of it is touched.

    Raises: OperatorError naming the run that uses it, which began in the same moment.
    """
    call(find_fleet().admit.remote([coordinator]), "the fleet", 60.0)


def check_services(spec: RunSpec) -> None:
    """Have the fleet ask every reward endpoint and the retriever, before anything slow starts."""
    call(find_fleet().check_services.remote(spec.model_dump(mode="json")), "the fleet", 60.0)


def _await_other_fleet(old_pid: int) -> Any:
    """Return what the fleet says of itself once it is another process. Raises: NeighbourError when that takes long."""
    for _ in until(CALL_S, RETRY_S):
        with contextlib.suppress(NeighbourError):  # between the two nobody answers
            now = call(find_fleet().describe_self.remote(), "the fleet")
            if now["pid"] != old_pid:
                return now
    raise NeighbourError("the fleet", f"was not started anew within {CALL_S:g} s")


def find_fleet() -> Any:
    """Return the fleet's handle. Raises: OperatorError when the cluster has none."""
    try:
        return ray.get_actor(FLEET, namespace=NAMESPACE)
    except ValueError:
        raise OperatorError(
            "The cluster has no fleet. Run deploy/start_cluster.sh again: it starts what is missing."
        ) from None
