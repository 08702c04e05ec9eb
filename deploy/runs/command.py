"""`sluice runs [list | logs [NAME] [--follow] | stop [NAME]]`: runs of this node's cluster, from outside.

Exit status: 0; 1 with one sentence; 2 for a wrong option.
"""

import argparse
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.cluster.known import connect_environment, is_ray_healthy, known_cluster, ray_connection
from learner.disk.run_folder import SETTINGS, MetricsReader
from protocol.errors import OperatorError
from protocol.node.current_run import current_run, logs_of_runs
from protocol.settings.loader import read_yaml
from protocol.waits import until

_TAIL_LINES = 40
_POLL_S = 0.5
_FREE_S = 20.0  # the processes of an ended command end a moment later
_ANSWER_S = 10.0


@dataclass(frozen=True)
class Run:
    """A run, seen from outside."""

    name: str
    is_running: bool  # its command lives
    pid: int | None  # process of its command on this node; None: on another node, or ended
    since: float  # Unix seconds of its start, or of its end when it has ended; 0: unknown
    step: str  # "12 of 60", or "-" when unknown
    folder: str  # empty: unknown
    log: Path | None  # file with its output; None: there is none here


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    if (state := known_cluster()) is not None:
        connect_environment(state)  # before anything imports Ray
    try:
        runs = find_runs()
        if options.verb == "logs":
            _show_log(_select(runs, options.name), follow=options.follow)
        elif options.verb == "stop":
            _stop(runs, options.name)
        elif options.json:
            print(json.dumps([asdict(run) | {"log": run.log and str(run.log)} for run in runs]))
        else:
            _show(runs)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        return 0  # the reader of a log has left
    return 0


def find_runs() -> list[Run]:
    """Return the run that uses this node's cluster, then the ended runs, newest first."""
    running = _find_running()
    names = {run.name for run in running}
    return running + [
        Run(log.stem, False, None, log.stat().st_mtime, "-", "", log) for log in logs_of_runs() if log.stem not in names
    ]


def is_running(name: str) -> bool:
    """Return whether a run of this name uses the cluster."""
    run = current_run()
    return name in _names_elsewhere() if run is None else run.run_id == name


def step_of(folder: Path) -> str:
    """Return the last step in a run folder and the number of steps, such as "12 of 60"."""
    lines = MetricsReader(folder / "metrics.jsonl").new_lines()
    settings = read_yaml(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    total = settings.get("run", {}).get("max_steps", "?")
    return f"{max(int(line['step']) for line in lines)} of {total}" if lines else f"0 of {total}"


def _find_running() -> list[Run]:
    if (run := current_run()) is not None:
        log = Path(run.log) if run.log else None
        return [Run(run.run_id, True, run.pid_here, run.started_at, step_of(Path(run.folder)), run.folder, log)]
    here = {log.stem: log for log in logs_of_runs()}  # the command has ended, its processes not yet
    return [Run(name, True, None, 0.0, "-", "", here.get(name)) for name in _names_elsewhere()]


def _names_elsewhere() -> list[str]:
    """Return the name of a run that another machine's command has on this cluster."""
    state = known_cluster()
    if state is None or not is_ray_healthy(state):
        return []
    with ray_connection(state):
        from deploy.cluster.attached_run import find_attached_run

        run = find_attached_run(_ANSWER_S, settle_s=0.0)
    return [] if run is None else [run.name or "(not attached yet)"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("sluice runs", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the runs as one JSON list")
    verbs = parser.add_subparsers(dest="verb", metavar="list | logs | stop")
    listed = verbs.add_parser("list", help="the running run with its start and step, and ended runs of --no-wait")
    listed.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print them as one JSON list")
    logs = verbs.add_parser("logs", help="the end of a run's output")
    logs.add_argument("--follow", action="store_true", help="print new output until the run ends, or Ctrl-C")
    stop = verbs.add_parser("stop", help="end a run after its step, as Ctrl-C does, and wait for its end")
    for verb in (logs, stop):
        verb.add_argument("name", metavar="NAME", nargs="?", help="the run's name (default: the newest)")
    return parser


def _show(runs: Sequence[Run]) -> None:
    if not runs:
        print("No run uses this cluster, and sluice run --no-wait has started none.")
        return
    table = Table("run", "state", "since", "step", "folder")
    for run in runs:
        state = f"running (process {run.pid})" if run.pid else "running elsewhere" if run.is_running else "ended"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.since)) if run.since else "-"
        table.add_row(run.name, state, since, run.step, run.folder or "-")
    Console(markup=False, emoji=False).print(table)
    for run in runs:
        if not run.is_running and (line := last_word(run.log)):
            print(f"{run.name}: {line}")


def _select(runs: Sequence[Run], name: str | None) -> Run:
    """Return the run of this name, or the newest without a name. Raises: OperatorError naming the known runs."""
    found = [run for run in runs if name in (None, run.name)]
    if found:
        return found[0]
    if name is None:
        raise OperatorError("sluice runs: no run is known here. sluice run starts one.")
    there = f"{', '.join(run.name for run in runs)} {'is' if len(runs) == 1 else 'are'}" if runs else "none is"
    raise OperatorError(f"sluice runs: {name} is not known here; {there}.")


def _show_log(run: Run, *, follow: bool) -> None:
    """Print the end of a run's output; with follow, new output until it ends. Raises: OperatorError without a log."""
    if run.log is None:
        where = f"its records are in {run.folder}" if run.folder else "see the machine of its command"
        raise OperatorError(f"sluice runs: {run.name} writes to the terminal of its command; {where}.")
    with run.log.open(encoding="utf-8", errors="replace") as log:
        print("".join(deque(log, _TAIL_LINES)), end="", flush=True)
        while follow:
            is_over = not is_running(run.name)
            print(log.read(), end="", flush=True)
            if is_over:
                return
            time.sleep(_POLL_S)


def _stop(runs: Sequence[Run], name: str | None) -> None:
    """End a run after its step; returns when the cluster is free.

    Raises: OperatorError when it runs elsewhere or does not end, or when the name is not known.
    """
    running = [run for run in runs if run.is_running]
    if name is not None and name in {run.name for run in runs} - {run.name for run in running}:
        print(f"{name} has ended.")
        return
    if name is None and not running:
        raise OperatorError("sluice runs: no run uses this cluster.")
    run = _select(running, name)
    from deploy.cluster.attached_run import AttachedRun, end_run  # imports Ray

    end_run(AttachedRun(run.name, run.pid), "sluice runs")
    for _ in until(_FREE_S, _POLL_S):
        if not is_running(run.name):
            break
    print(f"{run.name} has ended.")


def last_word(log: Path | None) -> str:
    """Return how a run ended: the line before its report's, else the last one that is not empty, such as an error."""
    if log is None or not log.is_file():
        return ""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    ends = [before for before, line in itertools.pairwise(lines) if line.startswith("Report: ")]
    return (ends or lines or [""])[-1]
