"""`--plan`: which process goes where, with how many GPUs and what it will cost in memory, without starting anything."""

from rich.console import Console
from rich.table import Table

from learner.disk.model_folder import count_parameters
from learner.run.checks.preflight import Inspected
from learner.run.topology import Processes, Strategy, Topology

_WHERE: dict[Strategy, str] = {"here": "this node", "DEFAULT": "packed", "SPREAD": "spread over nodes"}


def show_plan(inspected: Inspected, topology: Topology, has_cluster: bool) -> None:
    """Print the plan as a table. has_cluster: it was made for the cluster that runs here."""
    settings, start = inspected.settings, inspected.start
    learner, rollout = settings.learner, settings.rollout
    num_prompts = len(inspected.train.index) if inspected.train is not None else 0
    table = Table("process", "how many", "GPUs each", "memory each", "where", title=f"Run {start.run_id}")
    for processes in (topology.coordinator, topology.ranks, topology.servers):
        table.add_row(*_row(processes, has_cluster))
    console = Console()
    console.print(table)
    console.print(
        f"{count_parameters(inspected.model):,} parameters; {num_prompts:,} prompts; "
        f"steps {start.step + 1} to {settings.run.max_steps} of {learner.groups_per_step} groups x "
        f"{rollout.group_size} samples; at most {(learner.max_staleness + 1) * learner.groups_per_step} groups out "
        f"at a time; weights by {topology.backend}; run folder {start.folder}.",
        soft_wrap=True,
    )
    if not has_cluster:
        console.print(
            "No Sluice cluster runs here: GPUs are as the settings ask, and 0 on a cluster without any.", soft_wrap=True
        )
    for notice in inspected.notices:
        console.print(notice, soft_wrap=True)


def _row(processes: Processes, has_cluster: bool) -> tuple[str, str, str, str, str]:
    gpus = f"{processes.num_gpus}{'' if has_cluster or not processes.num_gpus else ' (0 without GPUs)'}"
    memory = f"{processes.memory_bytes / 2**20:,.0f} MiB {processes.besides}"
    memory += f", {processes.host_bytes / 2**20:,.0f} MiB of host memory" if processes.host_bytes else ""
    return processes.role, str(processes.count), gpus, memory, _WHERE[processes.strategy]
