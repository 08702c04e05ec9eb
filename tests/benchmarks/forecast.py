"""`sluice plan --forecast` beside real runs: `python -m tests.benchmarks.forecast [--seed N] [--short]`.

The work is that of `tests.benchmarks.throughput`, in runs of 16 steps on a running cluster (deploy/start_cluster.sh)
of a machine that does nothing else. Twelve runs vary staleness, groups, lengths, the reward's latency and servers. A
machine's own speed changes within minutes: before each four of them, and at the end, one more run gives figures. A
forecast is the mean of what the figures before and after say. `before`: settings that the figures before forecast alone
within 10 %. `drift`: the slowest run for figures over the fastest. --short: one other setting.

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
_PLACES, _NUM_CORES, _BLOCK = 128, 2, 4


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
    ratios, before, bases_s = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "model", arguments.seed)
        make_prompts(work / "prompts.jsonl", arguments.seed)

        def measured() -> Figures:
            name = f"base-{len(bases_s)}"
            bases_s.append(run(work, name, Case(), arguments.seed))
            return measure(work / "runs" / name, _NUM_CORES)

        figures = measured()
        for first in range(0, len(cases), _BLOCK):
            block = cases[first : first + _BLOCK]
            real = [run(work, f"case-{first + k}", case, arguments.seed) for k, case in enumerate(block)]
            earlier, figures = figures, measured()
            for case, real_s in zip(block, real, strict=True):
                then_s, now_s = forecast(case, earlier), forecast(case, figures)
                ratios.append((then_s + now_s) / 2.0 / real_s)
                before.append(then_s / real_s)
                print(f"{case}: {real_s:.2f} s a step, forecast {then_s:.2f} and {now_s:.2f} ({ratios[-1]:.2f})")
                sys.stdout.flush()
    num_within, num_before = (sum(abs(ratio - 1.0) <= _WITHIN for ratio in each) for each in (ratios, before))
    worst = max(ratios, key=lambda ratio: abs(ratio - 1.0))
    drift = max(bases_s) / min(bases_s)
    figures_of = {"settings": len(ratios), "within": num_within, "worst": worst, "before": num_before, "drift": drift}
    return conclude("forecast", num_within == len(ratios), **figures_of)


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
