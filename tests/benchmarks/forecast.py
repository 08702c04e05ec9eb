"""`sluice plan --forecast` beside real runs: `python -m tests.benchmarks.forecast [--seed N] [--short]`.

The work is that of `tests.benchmarks.throughput`, in runs of 16 steps on a running cluster (deploy/start_cluster.sh)
of a machine that does nothing else. Twelve runs vary staleness, groups, lengths, the reward's latency and servers. A
machine's own speed changes within minutes. So during each run a thread measures the cost of a fixed piece of work, and
the figures' seconds are multiplied by the ratio of these costs; and before each four runs, and at the end, one more run
gives figures. A forecast is the mean of those by the figures before and after. `plain`: settings that are within 10 %
without that thread's ratios. `drift`: the slowest run for figures over the fastest. --short: one other setting.

holds: each forecast step is within 10 % of the real one.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median

import numpy as np

from learner.run.forecast import Figures, measure
from learner.run.simulation import Layout, simulate
from tests.benchmarks.throughput import make_model, make_prompts, reward_service, run_command
from tests.chaos.rig.verdict import conclude, options

_WITHIN, _NUM_STEPS, _NUM_SIMULATED = 0.1, 16, 8
_PLACES, _NUM_CORES, _BLOCK = 128, 2, 4
_END_S = 2.0  # a run's command after its last step


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


@dataclass(frozen=True)
class Run:
    """A run on this machine."""

    step_s: float  # mean of its steps after the first
    work_s: float  # cost of the fixed piece of work during the run


def main() -> int:
    arguments = options(__doc__ or "")
    cases = _CASES[:1] if arguments.short else _CASES
    ratios, plain, bases = list[float](), list[float](), list[Run]()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "model", arguments.seed)
        make_prompts(work / "prompts.jsonl", arguments.seed)

        def measured() -> tuple[Figures, Run]:
            name = f"base-{len(bases)}"
            bases.append(run(work, name, Case(), arguments.seed))
            return measure(work / "runs" / name, _NUM_CORES), bases[-1]

        later = measured()
        for first in range(0, len(cases), _BLOCK):
            block = cases[first : first + _BLOCK]
            real = [run(work, f"case-{first + k}", case, arguments.seed) for k, case in enumerate(block)]
            earlier, later = later, measured()
            for case, found in zip(block, real, strict=True):
                both = [
                    (forecast(case, figures), forecast(case, figures.times(found.work_s / base.work_s)))
                    for figures, base in (earlier, later)
                ]
                plain_s, step_s = (fmean(each) for each in zip(*both, strict=True))
                plain.append(plain_s / found.step_s)
                ratios.append(step_s / found.step_s)
                forecast_is = f"forecast {step_s:.2f} ({ratios[-1]:.2f}), plain {plain_s:.2f}"
                print(f"{case}: {found.step_s:.2f} s a step, {forecast_is}", flush=True)
    num_within, num_plain = (sum(abs(ratio - 1.0) <= _WITHIN for ratio in each) for each in (ratios, plain))
    worst = max(ratios, key=lambda ratio: abs(ratio - 1.0))
    steps_s = [base.step_s for base in bases]
    drift = max(steps_s) / min(steps_s)
    figures_of = {"settings": len(ratios), "within": num_within, "worst": worst, "plain": num_plain, "drift": drift}
    return conclude("forecast", num_within == len(ratios), **figures_of)


def run(work: Path, name: str, case: Case, seed: int) -> Run:
    """Return the times of a real run."""
    changes = {
        "learner__groups_per_step": case.groups,
        "rollout__max_response_tokens": case.tokens,
        "rollout__num_servers": case.servers,
    }
    with reward_service(case.reward_s) as url, _costs_of_work() as costs:
        command = run_command(work, name, url, case.staleness, _NUM_STEPS, seed, **changes)
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (work / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    seconds = float(lines[-1]["time_s"] - lines[0]["time_s"])
    ended = costs[-1][0] - _END_S
    return Run(seconds / (len(lines) - 1), median(cost for at, cost in costs if ended - seconds < at < ended))


@contextmanager
def _costs_of_work() -> Iterator[list[tuple[float, float]]]:
    """Yield a list to which a thread adds, twice a second, the time and the CPU seconds of a fixed piece of work."""
    costs: list[tuple[float, float]] = []
    matrix, is_over = np.full((64, 64), 0.5, dtype=np.float32), threading.Event()

    def work() -> None:
        while not is_over.wait(0.5):
            begun = time.thread_time()
            for _ in range(200):
                matrix @ matrix
            sum(range(100_000))
            costs.append((time.monotonic(), time.thread_time() - begun))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield costs
    finally:
        is_over.set()
        thread.join()


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
