"""`sluice eval MODEL SET [SET ..]`: score a model on held-out prompts, on the running cluster.

The command is a run of no steps with one evaluation. One learner rank loads the model and pushes it to the warm rollout
servers; nothing is trained or saved. Exit status: as `sluice run`.
"""

import argparse
import json
import re
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

if __name__ == "__main__":
    # `python -m` puts the working folder first on the path, where a user may have a `protocol/` of their own.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from learner.disk.run_folder import LEDGER, SETTINGS, MetricsReader, read_only_uri
from learner.run.command import GivenOnce
from learner.run.command import main as run
from protocol.settings.evaluation import MAIN_SET
from protocol.settings.loader import GIVEN, load_saved_settings
from protocol.settings.paths import find_trained
from protocol.settings.section import LARGEST_COUNT

_ABOUT = """\
Score a model folder, or a Hugging Face name, on sets of held-out prompts without training it: means with their
standard error, pass@k, majority@n, and means by data source. Every answer is in evaluations.jsonl of the run folder.
A set is a JSONL or Parquet file, or NAME=FILE. Without a name the first set is held_out, and another has its file's
name. Settings may follow as in sluice run, such as --rollout.environment search."""
_PREFIX = "eval/"  # of a score's name in metrics.jsonl
_CODE = "code:"  # of the digests in a ledger: files of the user, scorers, search index


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("sluice eval", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="model folder, Hugging Face name, or the folder of a run")
    parser.add_argument("sets", metavar="SET", nargs="+", help="prompts with labels: FILE or NAME=FILE")
    parser.add_argument("--samples", type=int, default=1, help="samples of a prompt; one greedy sample is added")
    parser.add_argument("--num-prompts", type=int, default=LARGEST_COUNT, help="number of prompts of each set")
    parser.add_argument("--name", help="name of the run folder; by default the model's name and the time")
    parser.add_argument("--dir", default="runs", help="folder that holds the run folder")
    parser.add_argument(
        "--config",
        action=GivenOnce,
        help="settings file, as of sluice run; of a run or checkpoint: by default the run's",
    )
    parser.add_argument("--json", action="store_true", help="print the scores as one JSON object, last of all")
    options, settings = parser.parse_known_args(arguments)
    _, trained = find_trained(options.model)
    model_name = plain_name((trained or Path(options.model)).name)
    name = options.name or f"evaluate-{model_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if status := run([*settings_of_run(options, settings), *settings, *options_of(options, name)]):
        return status
    folder = Path(options.dir).expanduser() / name
    line = newest_evaluation(folder)
    if not (scores := scores_of(line)):
        return 0  # stopped, or --plan
    if changed := changed_since(trained, folder):
        others = "is not what it was" if len(changed) == 1 else "are not what they were"
        print(f"{', '.join(changed)} {others} in {trained}: compare no scores with that run's.", file=sys.stderr)
    if num_failed := line.get("eval/failed", 0):
        most = most_frequent_failure(folder)
        print(f"{num_failed:g} prompts failed and are in no score. Most frequent failure: {most}", file=sys.stderr)
    if options.json:
        print(json.dumps(scores))
    else:
        Console(markup=False, emoji=False).print(scores_table(scores))
    return 0


def options_of(options: argparse.Namespace, name: str) -> list[str]:
    """Return the settings of `sluice run` for a run that only evaluates."""
    sets = [_parse_set(given, number) for number, given in enumerate(options.sets)]
    has_main = sets[0][0] == MAIN_SET
    given = without_steps(options) | {
        "run.name": name,
        "run.dir": options.dir,
        "run.resume": "never",
        "data.eval": sets[0][1] if has_main else "null",
        "eval.sets": json.dumps([{"name": set_name, "data": file} for set_name, file in sets[has_main:]]),
    }
    return as_options(given)


def without_steps(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings of a run that trains and saves nothing, and evaluates once."""
    return {
        "objective": "policy_gradient",
        "run.max_steps": "0",
        "run.max_epochs": "null",
        "policy.model": model_of(options.model),
        "policy.warm_start.data": "null",
        "data.train": "",
        "eval.before": "true",
        "eval.every_steps": "1",
        "eval.best": "null",
        "eval.samples": str(options.samples),
        "eval.num_prompts": str(options.num_prompts),
    }


def as_options(settings: Mapping[str, str]) -> list[str]:
    return [part for key, value in settings.items() for part in (f"--{key}", value)]


def model_of(given: str) -> str:
    """Return the model that an argument names (`find_trained`)."""
    return find_trained(given)[0]


def settings_of_run(options: argparse.Namespace, settings: Sequence[str]) -> list[str]:
    """Return the option of the settings file: the given one, or the settings of the run that trained the model.

    A run of rows has no environment and no rewards: only the form of its weights is taken, which decides the tokens.
    settings: the command's own, which win. Raises: SettingsError for broken ones.
    """
    _, trained = find_trained(options.model)
    if options.config is not None:
        return ["--config", options.config]
    if trained is None or not (trained / GIVEN).is_file():
        return []
    saved = load_saved_settings(trained / SETTINGS)
    if saved.is_of_rows:
        policy = {"dtype": saved.policy.dtype, "trust_remote_code": str(saved.policy.trust_remote_code).lower()}
        given = {option.partition("=")[0] for option in settings}
        return as_options({f"policy.{n}": value for n, value in policy.items() if f"--policy.{n}" not in given})
    print(f"The settings are those of the run: {trained / GIVEN}. --config gives others.", file=sys.stderr, flush=True)
    return ["--config", str(trained / GIVEN)]


def changed_since(trained: Path | None, evaluation: Path) -> list[str]:
    """Return which scorers, files of the user and search index the last start of a run and its evaluation differ in."""
    ledgers = [folder / LEDGER for folder in (trained, evaluation) if folder is not None]
    if len(ledgers) < 2 or not all(path.is_file() for path in ledgers):
        return []
    codes = []
    for path in ledgers:
        with closing(sqlite3.connect(read_only_uri(path), uri=True)) as db:
            rows = db.execute("SELECT key, value FROM meta").fetchall()
        codes.append({key.removeprefix(_CODE): value for key, value in rows if key.startswith(_CODE)})
    of_run, now = codes
    return sorted(name for name in of_run.keys() & now.keys() if of_run[name] != now[name])


def _parse_set(given: str, number: int) -> tuple[str, str]:
    """Return a set's name and file. The first set without a name is data.eval."""
    name, equals, file = given.partition("=")
    if equals and "/" not in name:  # a path may hold = itself
        return name, file
    return (plain_name(Path(given).stem) if number else MAIN_SET), given


def plain_name(text: str) -> str:
    """Return text as a valid name of a run or a set."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text).lstrip("-_.")[:60] or "model"


def newest_evaluation(folder: Path) -> dict[str, float]:
    """Return the metrics line of a run's newest evaluation; {} when none has ended."""
    lines = [line for line in MetricsReader(folder / "metrics.jsonl").new_lines() if "eval/step" in line]
    return lines[-1] if lines else {}


def scores_of(line: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the scores of an evaluation's line, by set."""
    scores: dict[str, dict[str, float]] = {}
    for key, value in line.items():
        name, slash, figure = key.removeprefix(_PREFIX).partition("/")
        if key.startswith(_PREFIX) and slash:
            scores.setdefault(name, {})[figure] = value
    return scores


def most_frequent_failure(folder: Path) -> str:
    """Return what failed most samples of a run."""
    query = "SELECT boundary || ': ' || detail FROM failures GROUP BY 1 ORDER BY COUNT(*) DESC"
    with closing(sqlite3.connect(read_only_uri(folder / LEDGER), uri=True)) as db:
        (failure,) = db.execute(query).fetchone() or ("unknown",)
    return str(failure)


def scores_table(scores: dict[str, dict[str, float]]) -> Table:
    """Return a table of every figure, with its standard error if it has one."""
    table = Table("set", "figure", title="Scores", title_justify="left")
    table.add_column("value", justify="right")
    for name, figures in scores.items():
        for figure, value in figures.items():
            if figure.endswith("_error"):
                continue
            error = figures.get(f"{figure}_error")
            shown = f"{value:g}" if figure.endswith("num_prompts") else f"{value:.4f}"
            table.add_row(name, figure, shown if error is None else f"{shown} ± {error:.4f}")
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
