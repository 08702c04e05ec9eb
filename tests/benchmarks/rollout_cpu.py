"""What a trajectory of the quick start costs in processor time, process by process, and how long a step takes.

    deploy/start_cluster.sh && .venv/bin/python -m tests.benchmarks.rollout_cpu [--steps 30] [--runs 1]

Real parts throughout: the quick start's own settings, in which a step trains 256 trajectories of about 50 tokens with
searches and rewards over HTTP. Processor time is each process's own and its threads', from step 8's end to the last
one's, divided by the trajectories trained meanwhile; processes of another cluster on this machine count too. Prints a
table in Markdown, medians over the runs. holds: beside the engine's process the rollout server takes at most 3 ms a
trajectory, a step at most 1.6 s, and the median pause of a push is under 60 ms, as on two quiet cores. --short: 12
steps, and nothing of that is asked for.
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.benchmarks.quickstart_run import run_quickstart
from tests.chaos.rig.verdict import conclude, options

_FIRST_STEP = 8
_MAX_SERVER_MS, _MAX_STEP_S, _MAX_PAUSE_S = 3.0, 1.6, 0.06
# What a process calls itself, or its command says -> its part.
_PARTS = {
    "ray::RolloutServer": "rollout server",
    "VLLM::": "engine",
    "ray::StandbyProcess": "learner rank",
    "ray::CoordinatorProcess": "coordinator",
    "learner.run": "driver",
    "retriever.serve": "retriever",
    "rewards.serve": "reward service",
    "ray::": "the cluster's actors",
    "raylet": "Ray",
    "gcs_server": "Ray",
    "dashboard": "Ray",
}


def main() -> int:
    asked = options(__doc__ or "", steps=30, runs=1)
    num_steps = 12 if asked.short else asked.steps
    measured, failed = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        for run in range(asked.runs):
            folder = Path(scratch) / f"cpu-{run}"
            changed = {"run.max_steps": num_steps, "run.seed": asked.seed + run, "eval.every_steps": 0}
            with _watched(folder / "metrics.jsonl") as watch:
                outcome = run_quickstart(folder, {**changed, "learner.checkpoint_every_steps": 0})
            failed += outcome.exit_status != 0
            if outcome.exit_status:
                print(outcome.log)
                continue
            measured.append(_figures(folder / "metrics.jsonl", watch))
    figures = {name: statistics.median(each.get(name, 0.0) for each in measured) for name in _names(measured)}
    print("| part | ms of processor time a trajectory |\n|---|---|")
    for part in sorted(set(_PARTS.values()), key=lambda part: -figures.get(part, 0.0)):
        print(f"| {part} | {figures.get(part, 0.0):.2f} |")
    holds = bool(measured) and (
        figures["rollout server"] <= _MAX_SERVER_MS
        and figures["step_s"] <= _MAX_STEP_S
        and figures["pause_s"] < _MAX_PAUSE_S
    )
    return conclude(
        "rollout_cpu",
        failed == 0 and (asked.short or holds),
        runs=asked.runs,
        failed=failed,
        server_ms=round(figures.get("rollout server", 0.0), 2),
        step_s=round(figures.get("step_s", 0.0), 3),
        pause_s=round(figures.get("pause_s", 0.0), 4),
    )


class _Watch:
    """Processor seconds of each process when a step was seen to have ended, by step, and by part and id."""

    def __init__(self) -> None:
        self.seconds: dict[int, dict[tuple[str, int], float]] = {}


@contextmanager
def _watched(metrics: Path) -> Iterator[_Watch]:
    """Note the parts' processor seconds whenever the run has written a further step."""
    watch, ended = _Watch(), threading.Event()
    thread = threading.Thread(target=_watch, args=(metrics, watch, ended.is_set), daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()


def _watch(metrics: Path, watch: _Watch, is_over: Callable[[], bool]) -> None:
    while not is_over():
        time.sleep(0.1)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        step = max((json.loads(line)["step"] for line in lines), default=0)
        if step >= _FIRST_STEP and step not in watch.seconds:
            watch.seconds[step] = _seconds()


def _seconds() -> dict[tuple[str, int], float]:
    seconds = {}
    for process in psutil.process_iter():
        try:
            command, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        if part := next((part for name, part in _PARTS.items() if name in command), None):
            seconds[part, process.pid] = times.user + times.system
    return seconds


def _figures(metrics: Path, watch: _Watch) -> dict[str, float]:
    """Return each part's milliseconds a trajectory, and the step's seconds and pause, between two steps seen."""
    first, last = min(watch.seconds), max(watch.seconds)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    between = [line for line in lines if first < line["step"] <= last and "time_s" in line]
    begun = next(line["time_s"] for line in lines if line["step"] == first and "time_s" in line)
    num_samples = sum(line["num_samples"] for line in between)
    figures: dict[str, float] = {}
    for process in watch.seconds[first].keys() & watch.seconds[last].keys():
        used_s = watch.seconds[last][process] - watch.seconds[first][process]
        figures[process[0]] = figures.get(process[0], 0.0) + 1000.0 * used_s / num_samples
    figures["step_s"] = (between[-1]["time_s"] - begun) / len(between)
    figures["pause_s"] = statistics.median(line["pause_s"] for line in between if "pause_s" in line)
    return figures


def _names(measured: list[dict[str, float]]) -> set[str]:
    return {name for each in measured for name in each}


if __name__ == "__main__":
    sys.exit(main())
