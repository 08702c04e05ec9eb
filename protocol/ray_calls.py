"""Calls through Ray between the rooms: the names both sides look up, and what a call that failed is reported as.

Imports Ray inside functions only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protocol.errors import AwayError, NeighbourError, OperatorError

NAMESPACE = "sluice"
# What every actor of Sluice is made with. Ray's head would keep something of each call that was ever made, and a step
# is several calls: 5 MB for 100,000 of them. What calls do is in a run's own metrics.
OUR_ACTOR: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False}
FLEET = "sluice-fleet"
SERVER_PREFIX = "sluice-rollout-"

_REASON_LENGTH = 300


def own_node_id() -> str:
    """Return Ray's id of this process's node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def keeper_of(node_id: str) -> str:
    """Return the actor's name of the keeper of the node that Ray calls so."""
    return f"sluice-keeper-{node_id[:12]}"


@contextmanager
def naming_ray_errors(who: str, timeout_s: float) -> Iterator[None]:
    """Report what a call to `who` raises within the block in our own errors.

    Raises: what the callee raised, unwrapped, when it says what is wrong (OperatorError, NeighbourError); AwayError
    when Ray is about to start it again; NeighbourError naming `who` when it died, did not answer within timeout_s, or
    failed by a fault of its own, whose traceback is then the NeighbourError's cause. An error that is none of Ray's
    passes as it is.
    """
    try:
        yield
    except Exception as error:
        reported, cause = _reported(error, who, timeout_s)
        if reported is error:
            raise
        raise reported from cause


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; Ray's texts go on for a page. Its type's name when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _reported(error: Exception, who: str, timeout_s: float) -> tuple[Exception, Exception | None]:
    """Return the error to raise, and the one whose traceback is worth keeping."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

    # Asked first: what a callee raised is of its own type too, so that a TimeoutError over there is one here.
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, OperatorError | NeighbourError):
            return error.cause, None
        reason = " ".join(str(error.cause).split())[:_REASON_LENGTH]
        return NeighbourError(who, f"failed: {type(error.cause).__name__}: {reason}"), error
    if isinstance(error, TimeoutError):
        return NeighbourError(who, f"did not answer within {timeout_s:g} s"), None
    if isinstance(error, ActorUnavailableError):
        return AwayError(who, "died: its process or its node is gone, or out of reach"), None
    if isinstance(error, ActorDiedError):
        return NeighbourError(who, f"died: {first_line(error).rstrip('.')}"), None
    if isinstance(error, RayError):
        return NeighbourError(who, f"failed: {first_line(error)}"), error
    return error, None
