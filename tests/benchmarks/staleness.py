"""What staleness costs, and what the correction gives back: the quick start at staleness 0, 1, 4, 8, without and with.

    deploy/start_cluster.sh && .venv/bin/python -m tests.benchmarks.staleness [--only 0,8] [--steps 60] [--seeds 1]

Real parts throughout. "staleness trained on" in the table is the mean over steps: the window lets weights be as old as
max_staleness, and they need not be. Prints a table in Markdown. holds: every run exits with 0, and with the correction
the score at the largest staleness is at most 0.02 below that at staleness 0, means over --seeds seeds. About five
minutes a run on two cores, so not part of CI. --short: six steps each, and no score is asked for.
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.quickstart_run import Outcome, run_quickstart
from tests.chaos.rig.verdict import conclude, options

_STALENESS = (0, 1, 4, 8)
_CORRECTIONS = ("none", "tis")
_MAX_LOSS = 0.02

Runs = Mapping[tuple[int, str], list[Outcome]]


def main() -> int:
    arguments = options(__doc__ or "", only="", steps=60, seeds=1)
    wanted = [int(each) for each in arguments.only.split(",") if each] or list(_STALENESS)
    num_steps = 6 if arguments.short else arguments.steps
    found: dict[tuple[int, str], list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            for staleness in wanted:
                for correction in _CORRECTIONS:
                    changed: dict[str, object] = {
                        "learner.max_staleness": staleness,
                        "learner.correction": correction,
                        "learner.checkpoint_every_steps": 0,
                        "run.max_steps": num_steps,
                        "run.seed": seed,
                        "eval.every_steps": num_steps,
                    }
                    outcome = run_quickstart(Path(folder) / f"{staleness}-{correction}-{seed}", changed)
                    found.setdefault((staleness, correction), []).append(outcome)
                    print(
                        f"staleness: at most {staleness}, correction {correction}, seed {seed}: trained on "
                        f"{outcome.staleness:.2f}, {outcome.before:.3f} -> {outcome.after:.3f}",
                        flush=True,
                    )
                    if outcome.exit_status:
                        print(outcome.log, flush=True)
    print(table(found))
    loss = mean_after(found, min(wanted), "tis") - mean_after(found, max(wanted), "tis")
    failed = sum(outcome.exit_status != 0 for outcomes in found.values() for outcome in outcomes)
    return conclude(
        "staleness",
        failed == 0 and (arguments.short or loss <= _MAX_LOSS),
        runs=sum(map(len, found.values())),
        steps=num_steps,
        failed=failed,
        score_at_least=mean_after(found, min(wanted), "tis"),
        score_at_most=mean_after(found, max(wanted), "tis"),
        lost=loss,
        lost_without_correction=mean_after(found, min(wanted), "none") - mean_after(found, max(wanted), "none"),
    )


def mean_after(found: Runs, staleness: int, correction: str) -> float:
    """Return the held-out score at the end, mean over the seeds."""
    return statistics.mean(outcome.after for outcome in found[staleness, correction])


def table(found: Runs) -> str:
    """Return the runs as a Markdown table, means over the seeds."""
    lines = ["| max_staleness | correction | staleness trained on | score | greedy | s a step |", "|" + "---|" * 6]
    for (staleness, correction), outcomes in found.items():
        after = statistics.mean(each.after for each in outcomes)
        greedy = statistics.mean(each.greedy_after for each in outcomes)
        trained_on = statistics.mean(each.staleness for each in outcomes)
        step_s = statistics.mean(each.step_s for each in outcomes)
        lines.append(f"| {staleness} | {correction} | {trained_on:.2f} | {after:.3f} | {greedy:.3f} | {step_s:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
