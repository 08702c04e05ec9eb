"""`sluice generate MODEL PROMPTS OUT`: a model's answers to every prompt of a file, with their rewards.

A run of no steps, as `sluice eval` is: one rank pushes the model to the warm rollout servers, and the coordinator
writes OUT. The same command adds the rows that an earlier start left out. Exit status: as `sluice run`.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from learner.data.answers import read_answers, sort_answers
from learner.disk.run_folder import MetricsReader
from learner.evaluate import as_options, plain_name, settings_of_run, without_steps
from learner.run.command import GivenOnce
from learner.run.command import main as run
from protocol.settings.section import LARGEST_COUNT

_ABOUT = """\
Sample a model's answers to every row of PROMPTS (JSONL or Parquet) on the rollout servers, score them, and write OUT:
one JSON line for each row, in the order of PROMPTS, with all its samples. After a kill the same command adds the
missing rows. Environment, rewards and sampling come from the settings, as in sluice run: --rollout.temperature 0.7."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("sluice generate", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="model folder, Hugging Face name, or the folder of a run")
    parser.add_argument("prompts", metavar="PROMPTS", help="prompts, with labels if the reward needs them")
    parser.add_argument("out", metavar="OUT", type=Path, help="file of the answers; its run folder is OUT.run")
    parser.add_argument("--samples", type=int, default=1, help="samples of a prompt")
    parser.add_argument("--num-prompts", type=int, default=LARGEST_COUNT, help="number of prompts, from the first")
    parser.add_argument(
        "--config",
        action=GivenOnce,
        help="settings file, as of sluice run; of a run or checkpoint: by default the run's",
    )
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object, last of all")
    options, settings = parser.parse_known_args(arguments)
    if status := run([*settings_of_run(options, settings), *settings, *options_of(options)]):
        return status
    if not is_whole(options.out):
        return 0  # stopped, or --plan
    sort_answers(options.out)
    counts = count_answers(options.out)
    print(json.dumps(counts) if options.json else ", ".join(f"{name} {value:.6g}" for name, value in counts.items()))
    return 0


def options_of(options: argparse.Namespace) -> list[str]:
    """Return the settings of `sluice run` for a run that only writes answers."""
    folder = _run_folder(options.out)
    given = without_steps(options) | {
        "run.name": folder.name,
        "run.dir": str(folder.parent),
        "run.resume": "auto",
        "data.eval": options.prompts,
        "eval.sets": "[]",
        "eval.answers": str(options.out),
    }
    return as_options(given)


def is_whole(out: Path) -> bool:
    """Return whether the last start of the command that writes OUT ended with all rows."""
    return any("eval/step" in line for line in MetricsReader(_run_folder(out) / "metrics.jsonl").new_lines())


def count_answers(out: Path) -> dict[str, float]:
    """Return numbers of rows, samples and failed rows, and the mean rewards of all samples and of each row's best."""
    rewards, num_failed = [], 0
    for answers in read_answers(out):
        num_failed += answers.failed is not None
        rewards.append([sample.reward for sample in answers.samples])
    counts: dict[str, float] = {"rows": len(rewards), "samples": sum(map(len, rewards)), "failed": num_failed}
    if counts["samples"]:
        best = [max(row) for row in rewards if row]
        counts["reward"] = math.fsum(map(math.fsum, rewards)) / counts["samples"]
        counts["best_reward"] = math.fsum(best) / len(best)
    return counts


def _run_folder(out: Path) -> Path:
    out = out.expanduser()
    return out.with_name(f"{plain_name(out.name)}.run")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
