"""`--plan` on the cluster that runs here, and without one: what would run where."""

import os
from collections.abc import Sequence

from learner.run.checks.preflight import Inspected
from learner.run.cluster.cluster_end import cluster_end
from learner.run.plan import show_plan
from learner.run.rank_memory import read_sizes
from learner.run.topology import Node, plan_topology
from protocol.errors import OperatorError
from protocol.node.home import read_cluster


def plan(inspected: Inspected) -> None:
    """Print which process would go where; starts nothing. Raises: SettingsError when they do not fit."""
    nodes = _find_nodes()
    topology = plan_topology(inspected.settings, read_sizes(inspected.settings, inspected.model), nodes)
    show_plan(inspected, topology, has_cluster=nodes is not None)


def _find_nodes() -> Sequence[Node] | None:
    """Return the running cluster's machines, None when none runs."""
    try:
        cluster = read_cluster()
    except OperatorError:
        return None
    if cluster_end(cluster) is not None:
        return None
    os.environ |= cluster.ray_environment()
    from learner.run.cluster import ray_door

    with ray_door.connected(cluster):
        return ray_door.nodes()
