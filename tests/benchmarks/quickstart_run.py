"""One run of the quick start with some settings changed, from its command to its figures."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Outcome:
    """What a run came to; a figure that was not measured is NaN."""

    exit_status: int
    before: float  # held-out mean score at temperature 1, before the first step
    after: float  # after the last
    greedy_before: float  # the same with the likeliest token each time
    greedy_after: float
    step_s: float  # seconds from the first step's end to the last step's, a step
    seconds: float  # of the whole command
    staleness: float  # mean over steps of the trained trajectories' mean
    log: str  # end of what the command printed


def run_quickstart(folder: Path, changed: Mapping[str, object]) -> Outcome:
    """Run `python -m learner.run` to its end on the cluster that runs here. folder: the run's, not there yet.

    Raises: TimeoutError when it does not end within an hour.
    """
    given = {"run.name": folder.name, "run.dir": folder.parent, **changed}
    options = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    log = folder.parent / f"{folder.name}.log"
    begun = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "learner.run", *options], stdout=output, stderr=output)
        try:
            process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60.0)
            raise TimeoutError(f"{folder.name} did not end within {_LIMIT_S:g} s; see {log}") from None
    return outcome_of(folder / "metrics.jsonl", process.returncode, time.monotonic() - begun, log.read_text()[-2000:])


def outcome_of(metrics: Path, exit_status: int, seconds: float, log: str) -> Outcome:
    """Return the figures of a run from its lines."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [line for line in lines if line["step"] >= 1]
    scored = [line for line in lines if "eval/held_out/reward" in line]
    nan = float("nan")
    first, last = (scored[0], scored[-1]) if len(scored) > 1 else ({}, {})
    times = [line["time_s"] for line in steps if "time_s" in line]
    stale = [line["data/staleness_mean"] for line in steps if "data/staleness_mean" in line]
    return Outcome(
        exit_status=exit_status,
        before=first.get("eval/held_out/reward", nan),
        after=last.get("eval/held_out/reward", nan),
        greedy_before=first.get("eval/held_out/greedy", nan),
        greedy_after=last.get("eval/held_out/greedy", nan),
        step_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else nan,
        seconds=seconds,
        staleness=sum(stale) / len(stale) if stale else nan,
        log=log,
    )
