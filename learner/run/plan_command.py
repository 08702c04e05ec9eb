"""`--plan`: the places of a run's processes on the running cluster, on a described one, or without a cluster."""

import os
from collections.abc import Sequence
from pathlib import Path

from learner.cluster.cluster_loss import describe_cluster_loss
from learner.disk.model_folder import count_parameters
from learner.plan.described import described_nodes, described_size, read_description
from learner.plan.memory import Sizes, read_sizes
from learner.plan.needs import needs_critic, needs_reference
from learner.plan.processes import Node, Topology
from learner.plan.shown import count_of, plan_as_json, show_plan
from learner.plan.topology import plan_topology
from learner.run.checks.preflight import CheckedRun, check_run
from learner.run.parts import describe_parts
from protocol.errors import OperatorError
from protocol.node.home import ClusterState, read_cluster
from protocol.settings.settings import Settings


def plan(settings: Settings, description: Path | None, *, as_json: bool = False) -> Topology:
    """Print the place of each process, or one JSON object, and return them; starts nothing.

    description: file of a cluster; None: the running cluster.

    A description with the model's shape needs neither the model nor the prompts.
    Raises: SettingsError when they do not fit; the errors of `check_run`.
    """
    described = None if description is None else read_description(description)
    if described is not None and described.model is not None:
        sizes = Sizes(described_size(described.model, settings.policy.lora))
        topology = plan_topology(settings, sizes, described_nodes(described))
        facts = [*describe_parts(settings, None), _steps(settings, topology)]
        facts += _on_ranks(settings, ", each counted as large as it")
        _show(topology, settings.run.name, facts, as_json=as_json)
        return topology
    checked, cluster = check_run(settings), _find_cluster()
    settings = checked.settings
    nodes = _find_nodes(cluster) if described is None else described_nodes(described)
    topology = plan_topology(settings, read_sizes(settings, checked.model), nodes)
    facts = [*describe_parts(settings, cluster), *_facts(settings, checked, topology)]
    _show(topology, checked.start.run_id, facts, as_json=as_json)
    return topology


def _show(topology: Topology, run: str, facts: Sequence[str], *, as_json: bool) -> None:
    if topology.has_gpus:
        facts = [*facts, "Planned, not run: no GPU has run this version of Sluice yet."]
    if as_json:
        print(plan_as_json(topology, run, facts))
    else:
        show_plan(topology, f"Run {run}", facts)


def _facts(settings: Settings, checked: CheckedRun, topology: Topology) -> list[str]:
    start = checked.start
    num_prompts = len(checked.train.index) if checked.train is not None else 0
    return [
        f"{count_parameters(checked.model):,} parameters; {count_of(num_prompts, 'prompt')}; "
        f"{_steps(settings, topology, start.step + 1)} Run folder {start.folder}.",
        *_on_ranks(settings),
        *checked.notices,
    ]


def _steps(settings: Settings, topology: Topology, first: int = 1) -> str:
    learner, rollout, epochs = settings.learner, settings.rollout, settings.run.max_epochs
    last = settings.run.max_steps if epochs is None else f"the end of {epochs:g} epoch{'s' * (epochs != 1)}"
    if settings.is_of_rows:
        return f"Steps {first} to {last} of {learner.groups_per_step} rows."
    return (
        f"Steps {first} to {last} of {learner.groups_per_step} groups x {rollout.group_size} "
        f"samples; at most {(learner.max_staleness + 1) * learner.groups_per_step} groups out at a time; weights by "
        f"{topology.backend}."
    )


def _on_ranks(settings: Settings, how: str = "") -> list[str]:
    """how: the way in which they are counted without their folders."""
    named = (("the critic", needs_critic(settings)), ("the reference", needs_reference(settings)))
    on_ranks = [name for name, is_needed in named if is_needed]
    return [f"On the learner ranks, with the policy{how}: {' and '.join(on_ranks)}."] if on_ranks else []


def _find_cluster() -> ClusterState | None:
    """Return the running cluster; None when none runs."""
    try:
        cluster = read_cluster()
    except OperatorError:
        return None
    return cluster if describe_cluster_loss(cluster) is None else None


def _find_nodes(cluster: ClusterState | None) -> Sequence[Node] | None:
    """Return the nodes of the running cluster; None without one."""
    if cluster is None:
        return None
    os.environ |= cluster.ray_environment()
    from learner.cluster import ray_door

    with ray_door.connect(cluster):
        return ray_door.nodes()
