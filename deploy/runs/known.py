"""The runs that a node knows of: the one that uses its cluster, and those that were started with --no-wait before."""

from dataclasses import dataclass
from pathlib import Path

from deploy.cluster.known import connect_environment, is_ray_well, known_cluster
from learner.disk.metrics_lines import MetricsReader
from protocol.node.current_run import current_run, logs_of_runs
from protocol.settings.yaml_file import read_yaml

_ANSWER_S = 10.0
_SETTINGS, _METRICS = "settings.yaml", "metrics.jsonl"


@dataclass(frozen=True)
class Run:
    """A run, seen from outside."""

    name: str  # of the run
    is_running: bool  # True: its command lives
    pid: int | None  # of its command on this node; None: it runs on another, or has ended
    since: float  # Unix seconds of its start; of an ended one, of its end; 0: not known
    step: str  # "12 of 60", or "-" where it is not known
    folder: str  # the run's; empty: not known
    log: Path | None  # file with its output; None: it has none here


def find_runs() -> list[Run]:
    """Return the run that uses this node's cluster, then those that have ended, newest first."""
    running = _running()
    names = {run.name for run in running}
    return running + [
        Run(log.stem, False, None, log.stat().st_mtime, "-", "", log) for log in logs_of_runs() if log.stem not in names
    ]


def is_running(name: str) -> bool:
    """Return whether a run of this name uses the cluster. Of its folder, where metrics grow, nothing is read."""
    run = current_run()
    return name in _elsewhere() if run is None else run.run_id == name


def step_of(folder: Path) -> str:
    """Return the last step in a run folder and how many there are to be; "-" before the first."""
    lines = MetricsReader(folder / _METRICS).new_lines()
    settings = read_yaml(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else {}
    total = settings.get("run", {}).get("max_steps", "?")
    return f"{max(int(line['step']) for line in lines)} of {total}" if lines else f"0 of {total}"


def _running() -> list[Run]:
    if (run := current_run()) is not None:
        folder = Path(run.folder)
        log = Path(run.log) if run.log else None
        return [Run(run.run_id, True, run.pid_here, run.started_at, step_of(folder), run.folder, log)]
    here = {log.stem: log for log in logs_of_runs()}  # of a run that has just ended the cluster may not know it yet
    return [Run(name, True, None, 0.0, "-", "", here.get(name)) for name in _elsewhere()]


def _elsewhere() -> list[str]:
    """Return the name of a run that another machine's command has on this cluster."""
    state = known_cluster()
    if state is None or not is_ray_well(state):
        return []
    connect_environment(state)
    from deploy.cluster.fleet_client import connected, describe_fleet, describe_servers

    with connected(state.ray_address, state.node_ip):
        fleet = describe_fleet(_ANSWER_S)
        if fleet is None or not fleet["is_lending"]:
            return []
        names = {server["run"]["run_id"] for server in describe_servers(_ANSWER_S) if server.get("run")}
    return sorted(names) or ["(not attached yet)"]
