"""`python -m deploy.runs [list | logs [NAME] [--follow] | stop [NAME]]`: runs of this node's cluster, from outside.

Exit status: 0; 1 with one sentence; 2 for a wrong option.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.cluster.known import connect_environment, known_cluster
from deploy.runs.known import Run, find_runs, is_running
from protocol.errors import OperatorError
from protocol.waits import until

_TAIL_LINES = 40
_FOLLOW_S = 0.5
# The processes of a command that has ended end a moment after it.
_FREE_S = 20.0


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    if (state := known_cluster()) is not None:
        connect_environment(state)  # before anything imports Ray
    try:
        runs = find_runs()
        if options.verb == "logs":
            _show_log(_named(runs, options.name), follow=options.follow)
        elif options.verb == "stop":
            _stop(runs, options.name)
        else:
            _show(runs)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        return 0  # the reader of a log has seen enough
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m deploy.runs", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", metavar="list | logs | stop")
    verbs.add_parser("list", help="what runs, since when, at which step; and what --no-wait started before")
    logs = verbs.add_parser("logs", help="the end of a run's output")
    logs.add_argument("--follow", action="store_true", help="go on until the run ends, or Ctrl-C")
    stop = verbs.add_parser("stop", help="have a run end after its step, as Ctrl-C does, and wait for that")
    for verb in (logs, stop):
        verb.add_argument("name", metavar="NAME", nargs="?", help="of the run; by default the newest")
    return parser


def _show(runs: Sequence[Run]) -> None:
    if not runs:
        print("No run uses this cluster, and python -m learner.run --no-wait has started none.")
        return
    table = Table("run", "state", "since", "step", "folder")
    for run in runs:
        state = f"running (process {run.pid})" if run.pid else "running elsewhere" if run.is_running else "ended"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.since)) if run.since else "-"
        table.add_row(run.name, state, since, run.step, run.folder or "-")
    Console(markup=False, emoji=False).print(table)
    for run in runs:
        if not run.is_running and (line := _last_line(run.log)):
            print(f"{run.name}: {line}")


def _named(runs: Sequence[Run], name: str | None) -> Run:
    """Return the run of this name, of no name the newest. Raises: OperatorError naming those that there are."""
    found = [run for run in runs if name in (None, run.name)]
    if found:
        return found[0]
    if name is None:
        raise OperatorError("deploy.runs: no run is known here. python -m learner.run starts one.")
    there = f"{', '.join(run.name for run in runs)} {'is' if len(runs) == 1 else 'are'}" if runs else "none is"
    raise OperatorError(f"deploy.runs: {name} is not known here; {there}.")


def _show_log(run: Run, *, follow: bool) -> None:
    """Print the end of a run's output, and what comes until it ends. Raises: OperatorError when no file has it."""
    if run.log is None:
        where = f"its records are in {run.folder}" if run.folder else "see the machine that it was started on"
        raise OperatorError(f"deploy.runs: {run.name} writes to the terminal that it was started in; {where}.")
    with run.log.open(encoding="utf-8", errors="replace") as log:
        print("".join(deque(log, _TAIL_LINES)), end="", flush=True)
        while follow:
            is_over = not is_running(run.name)
            print(log.read(), end="", flush=True)
            if is_over:
                return
            time.sleep(_FOLLOW_S)


def _stop(runs: Sequence[Run], name: str | None) -> None:
    """Have a run end after its step; returns when the cluster is free. One that has ended is ended.

    Raises: OperatorError when it runs elsewhere or does not end, and where none of the name is known.
    """
    running = [run for run in runs if run.is_running]
    if name is not None and name in {run.name for run in runs} - {run.name for run in running}:
        print(f"{name} has ended.")
        return
    if name is None and not running:
        raise OperatorError("deploy.runs: no run uses this cluster.")
    run = _named(running, name)
    from deploy.cluster.attached_run import AttachedRun, drain  # which imports Ray

    drain(AttachedRun(run.name, run.pid), "deploy.runs")
    any(not is_running(run.name) for _ in until(_FREE_S, _FOLLOW_S))
    print(f"{run.name} has ended.")


def _last_line(log: Path | None) -> str:
    """Return the last line that says something, "" without any."""
    if log is None or not log.is_file():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")
