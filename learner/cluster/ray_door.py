"""The learner's one door to Ray: connect to the cluster, place coordinator and ranks, reach the rollout servers.

Ray carries control calls only: no trajectories, no weights.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from learner.cluster.cluster_end import cluster_end
from learner.plan.processes import Node
from protocol.errors import OperatorError, SettingsError
from protocol.node.drained import drained_nodes
from protocol.node.home import ClusterState
from protocol.node.living import living_nodes
from protocol.ray_calls import first_line, naming_ray_errors
from protocol.settings.placement import without_names_of_ray

CALL_S = 30.0
# Memory of GPUs that come with one size only, by Ray's names for them; of an H100 or A100 the name does not tell.
_GPU_BYTES = {"H200": 141 * 10**9, "L4": 24 * 10**9, "L40S": 48 * 10**9, "T4": 16 * 10**9}
RETRY_S = 0.1


@contextmanager
def connected(cluster: ClusterState) -> Iterator[None]:
    """Be a driver of the running cluster within the block; what it started there ends with it, if not detached.

    Raises: OperatorError when Ray does not answer.
    """
    try:
        # The node's own address is told: Ray's guess is another on a machine that has several, and another node's.
        options = {"namespace": cluster.namespace, "_node_ip_address": cluster.node_ip}
        ray.init(address=cluster.ray_address, log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, RuntimeError, RayError) as error:
        raise OperatorError(
            f"Ray at {cluster.ray_address} does not answer ({first_line(error)}). "
            "Start it with deploy/start_cluster.sh."
        ) from None
    _silence_ray()
    try:
        yield
    finally:
        # Asked first: of a cluster that is gone Ray would take leave for a minute.
        if cluster_end(cluster) is None:
            ray.shutdown()


def _silence_ray() -> None:
    """Keep Ray from printing pages of its own state over the run's view when a node's process dies: we say so in a
    sentence. Ray offers no switch for these; where its name for them has changed, they are printed.
    """
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def nodes() -> list[Node]:
    """Return the cluster's machines that are there and take new processes: those that are drained do not."""
    drained = drained_nodes()
    there = (found for found in living_nodes() if found["NodeID"] not in drained)
    return sorted((_node(found) for found in there), key=lambda node: node.node_ip)


@contextmanager
def naming_drained() -> Iterator[None]:
    """Say which nodes are not counted because they are drained, where the others cannot hold a run.

    Raises: what the block raises.
    """
    try:
        yield
    except SettingsError as error:
        drained = drained_nodes()
        left_out = sorted(node["NodeManagerAddress"] for node in living_nodes() if node["NodeID"] in drained)
        if not left_out:
            raise
        raise SettingsError(
            f"{error} Drained, and so not counted: {', '.join(left_out)}. python -m deploy.cluster undrain NODE lets a "
            "node take processes again."
        ) from None


def _node(found: Mapping[str, Any]) -> Node:
    resources = found["Resources"]
    return Node(
        node_ip=str(found["NodeManagerAddress"]),
        num_gpus=int(resources.get("GPU", 0)),
        node_id=str(found["NodeID"]),
        resources=without_names_of_ray(resources),
        gpu_bytes=next((size for kind, size in _GPU_BYTES.items() if f"accelerator_type:{kind}" in resources), None),
        is_head="node:__internal_head__" in resources,
    )


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
