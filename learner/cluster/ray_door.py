"""The learner's connection to Ray: connecting, the cluster's nodes, and calls with a deadline.

Ray carries control calls only: no trajectories and no weights.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from learner.cluster.cluster_loss import describe_cluster_loss
from learner.plan.processes import Node
from protocol.errors import OperatorError
from protocol.node.home import ClusterState
from protocol.one_line import first_line
from protocol.ray_calls import living_nodes, naming_ray_errors
from protocol.settings.placement import without_names_of_ray

CALL_S = 30.0
# Memory of GPUs that exist in one size, by Ray's names. H100 and A100 exist in several.
_GPU_BYTES = {"H200": 141 * 10**9, "L4": 24 * 10**9, "L40S": 48 * 10**9, "T4": 16 * 10**9}
RETRY_S = 0.1


@contextmanager
def connect(cluster: ClusterState) -> Iterator[None]:
    """Connect to the running cluster within the block; processes started there end with it unless they are detached.

    Raises: OperatorError when Ray does not answer.
    """
    try:
        # Ray would guess the node's address, wrongly on a machine with several.
        options = {"namespace": cluster.namespace, "_node_ip_address": cluster.node_ip}
        ray.init(address=cluster.ray_address, log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, RuntimeError, RayError) as error:
        raise OperatorError(
            f"Ray at {cluster.ray_address} does not answer ({first_line(error)}). Start it with sluice start."
        ) from None
    _silence_ray()
    try:
        yield
    finally:
        # Checked first: Ray would wait a minute to disconnect from a lost cluster.
        if describe_cluster_loss(cluster) is None:
            ray.shutdown()


def _silence_ray() -> None:
    """Keep Ray from printing pages over the run's view when a process dies: the run reports it in a sentence.

    Ray has no option for it. Where its internal name has changed, the pages are printed.
    """
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def nodes() -> list[Node]:
    """Return the living nodes, ordered by address."""
    return sorted(map(_node, living_nodes()), key=lambda node: node.node_ip)


def _node(found: Mapping[str, Any]) -> Node:
    resources = found["Resources"]
    return Node(
        node_ip=str(found["NodeManagerAddress"]),
        num_gpus=int(resources.get("GPU", 0)),
        node_id=str(found["NodeID"]),
        resources=without_names_of_ray(resources),
        gpu_bytes=next((size for kind, size in _GPU_BYTES.items() if f"accelerator_type:{kind}" in resources), None),
        num_cpus=int(resources.get("CPU", 0)) or None,
        is_head="node:__internal_head__" in resources,
    )


def is_done(reference: Any) -> bool:
    """Return whether a call has ended, with a result or an error."""
    return bool(ray.wait([reference], timeout=0)[0])


def call(reference: Any, who: str, timeout_s: float = CALL_S) -> Any:
    """Return a remote call's result. Blocks for timeout_s at most. Raises: as `naming_ray_errors` says."""
    with naming_ray_errors(who, timeout_s):
        return ray.get(reference, timeout=timeout_s)


def wait_any(references: Mapping[Any, str], timeout_s: float) -> list[str]:
    """Return the names of finished calls; raise the error of the first that failed. Blocks for timeout_s at most."""
    done, _ = ray.wait(list(references), num_returns=1, timeout=timeout_s) if references else ([], [])
    finished = []
    for reference in done:
        call(reference, references[reference])
        finished.append(references[reference])
    return finished
