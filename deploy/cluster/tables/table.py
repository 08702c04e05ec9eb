"""The table of what runs where, as `deploy.cluster` prints it after a start and for `status`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Row:
    """A process of the cluster."""

    what: str  # name of the process
    is_up: bool  # False: shown in red
    state: str  # healthy, warm or down; of a service also how often it was started again
    where: str  # URL, or address of its node
    pid: int  # 0: there is none
    log: str  # path of its log
    trouble: str = ""  # why it is not well


def show_rows(title: str, rows: Sequence[Row]) -> None:
    """Print one row for each process, then their logs: a path is on one line, however narrow the terminal."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "state", "where", "pid"):
        table.add_column(column, overflow="fold")
    for row in rows:
        colour = "green" if row.is_up else "red"
        state = row.state if row.is_up else row.state.replace("warm", "down")
        table.add_row(row.what, Text(state, colour), row.where, str(row.pid))
    Console(markup=False, emoji=False).print(table)
    for row in rows:
        if row.trouble:
            print(f"{row.what}: {row.trouble}")
    width = max(len(row.what) for row in rows)
    for row in rows:
        print(f"{row.what:<{width}}  {row.log}")


def show_how_to_join(join_file: Path) -> None:
    """Print the line that makes another machine part of this cluster."""
    print(f"Other nodes join with: deploy/start_cluster.sh --join {join_file}   (copy it there, or share its disk)")


def show_next_step() -> None:
    """Print what to do with a cluster that runs."""
    Console().print("Next: [bold].venv/bin/python -m learner.run[/]   (deploy/stop_cluster.sh ends everything)")
