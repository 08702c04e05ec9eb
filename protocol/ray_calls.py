"""Calls through Ray: names of actors, the living nodes, and the errors of failed calls. Only functions import Ray."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from protocol.errors import AwayError, NeighbourError, OperatorError
from protocol.one_line import first_line

NAMESPACE = "sluice"
# Options of every actor. Task events are off: Ray's head would keep 5 MB per 100,000 calls.
OUR_ACTOR: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False}
FLEET = "sluice-fleet"
SERVER_PREFIX = "sluice-rollout-"

_REASON_LENGTH = 300
_CONNECT_S = 2.0


def own_node_id() -> str:
    """Return Ray's id of this process's node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def keeper_of(node_id: str) -> str:
    """Return the name of the keeper actor on a node."""
    return f"sluice-keeper-{node_id[:12]}"


def living_nodes() -> list[Mapping[str, Any]]:
    """Return Ray's descriptions of the living nodes. Call it while connected to Ray.

    Ray notices a node's death up to half a minute late. A node that restarts within that time is described twice as
    alive: the description whose port listens is returned. If both seem to listen, neither is.
    """
    import ray

    by_socket: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for node in ray.nodes():
        if node["Alive"]:
            # One living process at a time has this socket on a machine.
            by_socket.setdefault((node["NodeManagerAddress"], node["RayletSocketName"]), []).append(node)
    living = []
    for same in by_socket.values():
        listening = same if len(same) == 1 else [node for node in same if _listens(node)]
        if len(listening) == 1:
            living += listening
    return living


@contextmanager
def naming_ray_errors(who: str, timeout_s: float) -> Iterator[None]:
    """Turn Ray's errors of a call to `who` within the block into our own. Other errors pass.

    Raises: the callee's OperatorError or NeighbourError, unwrapped; AwayError when Ray restarts the callee;
    NeighbourError naming `who` when it died, timed out after timeout_s or raised another error, which is the cause.
    """
    try:
        yield
    except Exception as error:
        reported, cause = _translate(error, who, timeout_s)
        if reported is error:
            raise
        raise reported from cause


def _listens(node: Mapping[str, Any]) -> bool:
    with suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _CONNECT_S).close()
        return True
    return False


def _translate(error: Exception, who: str, timeout_s: float) -> tuple[Exception, Exception | None]:
    """Return the error to raise and its cause; None: no cause."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

    # First: Ray's error has the type of the callee's error too, such as TimeoutError.
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, OperatorError | NeighbourError):
            return error.cause, None
        reason = " ".join(str(error.cause).split())[:_REASON_LENGTH]
        return NeighbourError(who, f"failed: {type(error.cause).__name__}: {reason}"), error
    if isinstance(error, TimeoutError):
        return NeighbourError(who, f"did not answer within {timeout_s:g} s"), None
    if isinstance(error, ActorUnavailableError):
        return AwayError(who, "died: its process or its node is gone or unreachable"), None
    if isinstance(error, ActorDiedError):
        return NeighbourError(who, _end_of(error)), None
    if isinstance(error, RayError):
        return NeighbourError(who, f"failed: {first_line(error)}"), error
    return error, None


def _end_of(error: Exception) -> str:
    """Return why an actor died: of a failed constructor, whose traceback is Ray's text, the last line."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and "raised in its creation task" in lines[0]:
        return f"could not start: {lines[-1].strip()}"[:_REASON_LENGTH]
    return f"died: {first_line(error).rstrip('.')}"
