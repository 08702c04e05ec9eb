"""The plan of an attempt on the nodes that are there now; it waits until they can hold the run."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from learner.cluster import ray_door
from learner.cluster.cluster_loss import check_cluster
from learner.plan.topology import place_servers, plan_topology
from protocol.errors import OperatorError, SettingsError
from protocol.node.ray_nodes import drained_nodes

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from learner.live.view import LiveView
    from learner.plan.processes import Processes, Topology
    from learner.run.context import RunContext
    from protocol.node.home import ClusterState
    from protocol.settings.settings import Settings

_POLL_S = 0.5
# A restarted node is back within minutes.
_NODES_S = 180.0


class StoppedAtStart(Exception):
    """Ctrl-C, SIGTERM or SIGHUP came while the run was still starting."""


def await_nodes(plan: Callable[[], Topology], view: LiveView, stop: threading.Event, cluster: ClusterState) -> Topology:
    """Return the result of `plan` as soon as it raises no SettingsError.

    Blocks for 180 s at most.
    Raises: OperatorError with the reason; StoppedAtStart; NeighbourError when the cluster is gone.
    """
    deadline = time.monotonic() + _NODES_S
    while True:
        try:
            with ray_door.naming_drained():
                return plan()
        except SettingsError as error:
            if time.monotonic() > deadline:
                raise OperatorError(f"The cluster's nodes cannot hold the run any more. {error}") from None
            view.show_phase(f"waiting for nodes: {' '.join(str(error).split())}")
        if stop.wait(_POLL_S):
            raise StoppedAtStart
        check_cluster(cluster)


def plan_run(context: RunContext) -> Topology:
    """Return the plan for the nodes that are there and not drained; with fewer servers where nodes are drained.

    Raises: SettingsError when the nodes do not hold the run.
    """
    nodes = ray_door.nodes()
    try:
        return plan_topology(_with_servers(context, context.num_servers), context.sizes, nodes)
    except SettingsError:
        for number in range(context.num_servers - 1, 0, -1) if drained_nodes() else ():
            with contextlib.suppress(SettingsError):
                return plan_topology(_with_servers(context, number), context.sizes, nodes)
        raise


def plan_servers(context: RunContext, topology: Topology, number: int) -> Processes:
    """Return the places of this number of servers next to the running ranks. topology: of the running attempt.

    Raises: OperatorError when they have no room, or not in this attempt.
    """
    again = "Stop the run, set rollout.num_servers, and give the run's command again."
    if topology.shares_devices:
        raise OperatorError(f"Ranks and servers of this run share GPUs, which have no room for another server. {again}")
    planned = plan_topology(_with_servers(context, number), context.sizes, ray_door.nodes())
    if planned.backend != topology.backend:
        raise OperatorError(
            f"With {number} rollout servers weights would travel by {planned.backend}, and now they do by "
            f"{topology.backend}. {again}"
        )
    return place_servers(topology.ranks, planned, context.settings)


def _with_servers(context: RunContext, number: int) -> Settings:
    settings = context.settings
    return settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"num_servers": number})})
