"""Every recipe on the quick start's task: held-out score before and after, and the time it takes.

    deploy/start_cluster.sh && .venv/bin/python -m tests.benchmarks.recipes [--only NAME,NAME] [--steps 60] [--seeds 1]

Real vLLM, DeepSpeed, retriever and reward service; the warm start is made once and found again. Each recipe runs as
its bundle says, with the quick start's learning rate; --seeds N: N seeds of each, from --seed on. Prints a line a run
and a table in Markdown. holds: each run exits with 0 and raises the score at temperature 1 by at least 0.3. About five
minutes a run on two cores, so not part of CI. --short: four steps each, and no score is asked for.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.quickstart_run import Outcome, run_quickstart
from tests.chaos.rig.verdict import conclude, options

_MIN_RISE = 0.3
# What a recipe's run is given beside its name.
RECIPES: dict[str, dict[str, object]] = {
    "grpo": {},
    "dapo": {},
    "dr_grpo": {},
    "rloo": {},
    "reinforce_pp": {"learner.equal_groups": "keep"},
    "ppo": {"learner.equal_groups": "keep"},
    "gspo": {},
    "cispo": {},
}


def main() -> int:
    arguments = options(__doc__ or "", only="", steps=60, seeds=1)
    names = [name for name in arguments.only.split(",") if name] or list(RECIPES)
    if unknown := sorted(set(names) - set(RECIPES)):
        print(f"recipes: --only names {', '.join(unknown)}; recipes: {', '.join(RECIPES)}")
        return 2
    num_steps = 4 if arguments.short else arguments.steps
    found: list[tuple[str, int, Outcome]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for seed in range(arguments.seed, arguments.seed + arguments.seeds):
                changed = {"learner.recipe": name, "run.seed": seed, "run.max_steps": num_steps, **RECIPES[name]}
                changed |= {"eval.every_steps": num_steps, "learner.checkpoint_every_steps": 0}
                outcome = run_quickstart(Path(folder) / f"{name}-{seed}", changed)
                found.append((name, seed, outcome))
                print(f"recipes: {name} seed {seed}: {outcome.before:.3f} -> {outcome.after:.3f}", flush=True)
                if outcome.exit_status:
                    print(outcome.log, flush=True)
    print(table(found))
    rises = [outcome.after - outcome.before for _, _, outcome in found]
    have_risen = arguments.short or all(rise >= _MIN_RISE for rise in rises)
    return conclude(
        "recipes",
        have_risen and all(outcome.exit_status == 0 for _, _, outcome in found),
        runs=len(found),
        steps=num_steps,
        failed=sum(outcome.exit_status != 0 for _, _, outcome in found),
        rise_min=min(rises),
        after_min=min(outcome.after for _, _, outcome in found),
    )


def table(found: Sequence[tuple[str, int, Outcome]]) -> str:
    """Return the runs as a Markdown table."""
    lines = ["| recipe | seed | score before | after | greedy before | after | s a step | s in all |", "|" + "---|" * 8]
    for name, seed, run in found:
        scores = f"{run.before:.3f} | {run.after:.3f} | {run.greedy_before:.3f} | {run.greedy_after:.3f}"
        lines.append(f"| {name} | {seed} | {scores} | {run.step_s:.2f} | {run.seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
