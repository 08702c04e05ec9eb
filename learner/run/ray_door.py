"""The learner's one door to Ray: connect to the cluster, place coordinator and ranks, reach the rollout servers.

Ray carries control calls only: no trajectories, no weights.
"""

import socket
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from protocol.errors import OperatorError
from protocol.node.home import ClusterState
from protocol.ray_calls import first_line, naming_ray_errors

_CONNECT_S = 5.0
CALL_S = 30.0
RETRY_S = 0.1


def connect(cluster: ClusterState) -> None:
    """Join the running cluster as a driver. Raises: OperatorError when Ray does not answer."""
    try:
        # Asked first: for a head that is gone Ray waits two minutes, then ends this process without an exception.
        host, _, port = cluster.ray_address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=cluster.ray_address, namespace=cluster.namespace, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, RayError) as error:
        raise OperatorError(
            f"Ray at {cluster.ray_address} does not answer ({first_line(error)}). "
            "Start it with deploy/start_cluster.sh."
        ) from None


def num_gpus() -> int:
    """Return the GPUs of the whole cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def is_done(reference: Any) -> bool:
    """Return whether a call has ended, well or not."""
    return bool(ray.wait([reference], timeout=0)[0])


def call(reference: Any, who: str, timeout_s: float = CALL_S) -> Any:
    """Return a remote call's result. Blocks for timeout_s at most. Raises: as `naming_ray_errors` says."""
    with naming_ray_errors(who, timeout_s):
        return ray.get(reference, timeout=timeout_s)


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
