"""The learner's one door to Ray: connect to the cluster, place coordinator and ranks, reach the rollout servers.

Ray carries control calls only: no trajectories, no weights.
"""

import socket
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from protocol.errors import NeighbourError, OperatorError
from protocol.node.home import ClusterState

_CONNECT_S = 5.0
CALL_S = 30.0
RETRY_S = 0.1
_REASON_LENGTH = 300


def connect(cluster: ClusterState) -> None:
    """Join the running cluster as a driver. Raises: OperatorError when Ray does not answer."""
    try:
        # Asked first: for a head that is gone Ray waits two minutes, then ends this process without an exception.
        host, _, port = cluster.ray_address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=cluster.ray_address, namespace=cluster.namespace, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, RayError) as error:
        raise OperatorError(
            f"Ray at {cluster.ray_address} does not answer ({_first_line(error)}). "
            "Start it with deploy/start_cluster.sh."
        ) from None


def num_gpus() -> int:
    """Return the GPUs of the whole cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def is_done(reference: Any) -> bool:
    """Return whether a call has ended, well or not."""
    return bool(ray.wait([reference], timeout=0)[0])


def call(reference: Any, who: str, timeout_s: float = CALL_S) -> Any:
    """Return a remote call's result.

    Raises: what the callee raised, unwrapped, when it says what is wrong; NeighbourError naming `who` when it died, did
    not answer in time, or failed by a fault of its own, whose traceback is then the NeighbourError's cause.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise NeighbourError(who, f"did not answer within {timeout_s:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, OperatorError | NeighbourError):
            raise error.cause from None
        reason = " ".join(str(error.cause).split())[:_REASON_LENGTH]
        raise NeighbourError(who, f"failed: {type(error.cause).__name__}: {reason}") from error
    except (ActorDiedError, ActorUnavailableError) as error:
        raise NeighbourError(who, f"died: {_first_line(error)}") from None
    except RayError as error:
        raise NeighbourError(who, f"failed: {_first_line(error)}") from error


def wait_any(references: Mapping[Any, str], timeout_s: float) -> list[str]:
    """Return who of these has finished; raise what any of them raised. Blocks at most timeout_s."""
    done, _ = ray.wait(list(references), num_returns=1, timeout=timeout_s) if references else ([], [])
    finished = []
    for reference in done:
        call(reference, references[reference])
        finished.append(references[reference])
    return finished


def disconnect() -> None:
    """Leave the cluster; what this process started there ends, but for what is detached."""
    ray.shutdown()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
