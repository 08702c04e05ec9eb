"""`sluice plan --forecast` beside real runs: `python -m tests.benchmarks.forecast [--seed N] [--short]`.

The work is that of `tests.benchmarks.throughput`, in runs of 16 steps on a running cluster (deploy/start_cluster.sh)
of a machine that does nothing else. The first run gives the figures; twelve others vary staleness, groups, lengths,
the reward's latency and servers. `repeat` is the ratio of the last run's step, with the first run's settings, to the
first's: a machine that is not quiet shows it there. --short: one other setting.

holds: each forecast step is within 10 % of the real one.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean

from learner.run.forecast import Figures, measure
from learner.run.simulation import Layout, simulate
from tests.benchmarks.throughput import make_model, make_prompts, reward_service, run_command
from tests.chaos.rig.verdict import conclude, options

_WITHIN, _NUM_STEPS, _NUM_SIMULATED = 0.1, 16, 8
_PLACES, _NUM_CORES = 128, 2


@dataclass(frozen=True)
class Case:
    staleness: int = 1
    groups: int = 8
    tokens: int = 256  # of the longest answer
    reward_s: float = 0.5
    servers: int = 1


_CASES = [
    Case(staleness=0),
    Case(staleness=2),
    Case(staleness=4),
    Case(groups=4),
    Case(groups=16),
    Case(staleness=4, groups=16),
    Case(tokens=128),
    Case(staleness=4, tokens=192),
    Case(staleness=0, reward_s=2.0),
    Case(reward_s=3.0),
    Case(servers=2),
    Case(staleness=4, servers=2),
]


def main() -> int:
    arguments = options(__doc__ or "")
    cases = _CASES[:1] if arguments.short else _CASES
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "model", arguments.seed)
        make_prompts(work / "prompts.jsonl", arguments.seed)
        first_s = run(work, "first", Case(), arguments.seed)
        figures = measure(work / "runs" / "first", _NUM_CORES)
        for number, case in enumerate(cases):
            real_s, forecast_s = run(work, f"case-{number}", case, arguments.seed), forecast(case, figures)
            ratios.append(forecast_s / real_s)
            print(f"{case}: {real_s:.2f} s a step, forecast {forecast_s:.2f} ({ratios[-1]:.2f})", flush=True)
        repeat = run(work, "last", Case(), arguments.seed) / first_s
    num_within = sum(abs(ratio - 1.0) <= _WITHIN for ratio in ratios)
    figures_of = {"settings": len(ratios), "within": num_within, "worst": max(ratios, key=lambda r: abs(r - 1.0))}
    return conclude("forecast", num_within == len(ratios), **figures_of, repeat=repeat)


def run(work: Path, name: str, case: Case, seed: int) -> float:
    """Return the mean of a real run's steps after the first, in seconds."""
    changes = {
        "learner__groups_per_step": case.groups,
        "rollout__max_response_tokens": case.tokens,
        "rollout__num_servers": case.servers,
    }
    with reward_service(case.reward_s) as url:
        command = run_command(work, name, url, case.staleness, _NUM_STEPS, seed, **changes)
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (work / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return float(lines[-1]["time_s"] - lines[0]["time_s"]) / (len(lines) - 1)


def forecast(case: Case, figures: Figures) -> float:
    """Return the seconds of a simulated step, the mean of several runs of as many steps."""
    layout = Layout(case.servers, 1, case.groups, 8, case.staleness, max_running=_PLACES)
    rates = figures.model_copy(update={"reward_s": figures.reward_s + case.reward_s - Case().reward_s})
    draw = _lengths(figures.lengths or [], case.tokens, Random(1))
    return fmean(simulate(layout, rates, draw, _NUM_STEPS).step_s for _ in range(_NUM_SIMULATED))


def _lengths(lengths: list[int], longest: int, draw: Random) -> Callable[[], int]:
    return lambda: min(longest, draw.choice(lengths))


if __name__ == "__main__":
    sys.exit(main())
