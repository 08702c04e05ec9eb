"""The table of what runs where, as `deploy.cluster` prints it after a start and for `status`."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from protocol.node.home import ClusterState, ProcessRecord


def show_cluster(
    state: ClusterState, health: Sequence[tuple[ProcessRecord, bool]], servers: Sequence[dict[str, Any]]
) -> None:
    """Print one row for each process and each rollout server."""
    table = Table(title=f"Sluice on {state.node_ip}", title_justify="left")
    for column in ("what", "state", "where", "pid", "log"):
        table.add_column(column, overflow="fold")
    for record, is_healthy in health:
        word = "[green]healthy[/]" if is_healthy else "[red]down[/]"
        table.add_row(record.name, word, record.url or "", str(record.pid), record.log)
    for server in servers:
        word = "[green]warm[/]" if server["is_alive"] else "[red]down[/]"
        table.add_row(server["name"], word, server["node_ip"], str(server["pid"]), server["log"])
    Console().print(table)


def show_next_step() -> None:
    """Print what to do with a cluster that runs."""
    Console().print("Next: [bold].venv/bin/python -m learner.run[/]   (deploy/stop_cluster.sh ends everything)")
