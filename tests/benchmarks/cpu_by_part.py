"""CPU seconds per sample of a run of `tests.benchmarks.throughput`, by part, from /proc."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_POLL_S = 0.2
# A process's part by what its title or command line has in it, or else its parent's.
_PARTS = (
    ("rollout servers", ("VLLM::", "ray::RolloutServer")),
    ("learner ranks", ("ray::StandbyProcess", "ray::Rank")),
    ("coordinator", ("ray::Coordinator",)),
    ("run's command", ("learner.run",)),
)
_OTHERS = "cluster"
_CpuTimes = Counter[tuple[str, int, float]]


def cpu_per_sample(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], metrics: Path, home: Path
) -> dict[str, float]:
    """Run a command in a folder; return CPU seconds per sample by part, between the ends of its first and last step.

    metrics: the run's metrics.jsonl. home: SLUICE_HOME of its cluster and command. Raises: SystemExit when it fails.
    """
    process = subprocess.Popen(command, cwd=folder, env=dict(environment), stdout=subprocess.DEVNULL)
    begin, last = None, _CpuTimes()
    while process.poll() is None:
        last |= cpu_seconds(home)  # ended ones keep their value
        if begin is None and metrics.exists() and metrics.read_bytes().count(b"\n"):
            begin = Counter(last)
        time.sleep(_POLL_S)
    if process.returncode or begin is None:
        raise SystemExit(f"the run ended with {process.returncode}: {' '.join(command)}")
    num_samples = sum(json.loads(line)["data/num_samples"] for line in metrics.read_text().splitlines()[1:])
    used: Counter[str] = Counter()
    for (part, _, _), seconds in (last - begin).items():
        used[part] += seconds / num_samples  # type: ignore[assignment]
    return {"all": sum(used.values()), **used}


def cpu_seconds(home: Path) -> _CpuTimes:
    """Return the CPU seconds so far of each process of a SLUICE_HOME: (part, id, start)."""
    found = _CpuTimes()
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLUICE_HOME") == str(home):
                times = process.cpu_times()
                found[_part_of(process), process.pid, process.create_time()] = times.user + times.system  # type: ignore[assignment]
        except psutil.Error:
            continue  # it has ended, or is another user's
    return found


def _part_of(process: psutil.Process) -> str:
    for each in (process, *process.parents()):
        title = " ".join(each.cmdline())
        for part, marks in _PARTS:
            if any(mark in title for mark in marks):
                return part
    return _OTHERS
