"""Writes a run's report.html, or a page that compares runs: files that open without a network.

A run may be finished, running, killed or empty.
"""

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.disk.run_folder import comparable_since, main_set
from learner.live.alarms import alarms_of
from learner.live.panel import describe_slowness, step_times
from learner.report.facts import RunFacts, read_run, settings_table
from learner.report.headline import HELD_OUT_LOSS, compared_steps, make_headline, score_text, version_of
from learner.report.page import render_page
from learner.report.plots import Plot, compared_plots, metric_plots, outside_band, reward_plot
from learner.report.samples import pair_answers, read_groups
from protocol.disk.files import naming_disk_errors, replacing
from protocol.errors import OperatorError

_RECORDS = ("settings.yaml", "metrics.jsonl", "ledger.sqlite", "samples.jsonl")
# Settings that name a run and change nothing about it.
_NAMES = ("run.name", "run.dir")
COLUMNS = ("run", "steps", "score", "first", "last", "best", "at step", "last greedy", "samples/s")
_DATA = ("data.eval", "eval.sets", "eval.num_prompts", "eval.samples")


def write_report(run_folder: Path, tokenizer_dir: Path | None) -> Path:
    """Write report.html into the run folder and return its path.

    tokenizer_dir: folder with tokenizer.json; None: policy.model of the run's settings, where that is a folder.
    Raises: OperatorError when run_folder is not a run's folder or cannot be written.
    """
    run = _read(run_folder)
    notes = list(run.notes)
    groups = read_groups(run_folder / "samples.jsonl", tokenizer_dir or _model_folder(run), notes)
    first, last, held_out = compared_steps(run.lines)
    changes, pairs = pair_answers(run_folder / "evaluations.jsonl", first, last, held_out)
    timed = [line for line in run.lines if "time/wait_s" in line]
    outside, num_checked = outside_band(run.lines)
    page = render_page(
        "page.html.j2",
        run=run,
        headline=make_headline(run),
        alarms=alarms_of(run.lines, run.settings.health) if run.settings else [],
        outside=outside,
        num_checked=num_checked,
        reward=reward_plot(run.lines),
        curves=metric_plots(run.lines, _unused_endpoints(run)),
        groups=groups,
        changes=changes,
        pairs=pairs,
        steps=(first, last),
        slowness=describe_slowness(timed, run.ledger.failures if run.ledger else {}),
        shares=_shares([step_times(line) for line in timed]),
        settings=settings_table(run.settings) if run.settings else [],
        notes=notes,
    )
    return _write(run_folder / "report.html", page)


def write_comparison(run_folders: Sequence[Path]) -> Path:
    """Write a page that compares runs next to the first run's folder, and return its path.

    Raises: OperatorError when one of them is not a run's folder or is there twice, or the page cannot be written.
    """
    if len({folder.resolve() for folder in run_folders}) < len(run_folders):
        raise OperatorError("A run is given twice. Give each run's folder once.")
    runs = [_read(folder) for folder in run_folders]
    comparison = compare_runs(runs)
    name = "_".join(comparison.names).replace("/", "_")[:200]
    return _write(
        run_folders[0].resolve().parent / f"{name}.html",
        render_page("compare.html.j2", comparison=comparison, columns=COLUMNS),
    )


@dataclass(frozen=True)
class Comparison:
    """Everything that the page shows."""

    names: list[str]
    scores: list[list[str]]  # a row of COLUMNS for each run; empty texts were not measured
    settings: list[tuple[str, list[str]]]  # (name, value in each run) of the settings that differ
    notes: list[str]
    plots: list[Plot]


def compare_runs(runs: Sequence[RunFacts]) -> Comparison:
    """Return the comparison. Runs with one name are numbered."""
    names = _names(runs)
    tables = [
        {} if run.settings is None else {name: value for name, value, _ in settings_table(run.settings)} for run in runs
    ]
    known = dict.fromkeys(name for table in tables for name in table if name not in _NAMES)
    rows = [(name, [table.get(name, "unknown") for table in tables]) for name in known]
    differing = [(name, values) for name, values in rows if len(set(values)) > 1]
    notes = [f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in run.notes]
    if unlike := [name for name, _ in differing if name in _DATA]:
        notes.append(f"Held-out scores are not of the same questions: {', '.join(unlike)} differ.")
    plots = compared_plots({name: run.lines for name, run in zip(names, runs, strict=True)})
    return Comparison(names, [_scores(*each) for each in zip(names, runs, strict=True)], differing, notes, plots)


def _names(runs: Sequence[RunFacts]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [f"{name} {index}" for index, name in enumerate(names, 1)]


def _scores(name: str, run: RunFacts) -> list[str]:
    steps = f"{run.lines[-1]['step']:.0f}" if run.lines else "0"
    scored = [line for line in run.lines if main_set(line)]
    key = f"eval/{main_set(scored[-1])}/reward" if scored else HELD_OUT_LOSS
    if not (having := [line for line in run.lines if key in line]):
        key, having = "reward/mean", run.reward_lines
    if not having:
        return [name, steps, key, *[""] * (len(COLUMNS) - 3)]
    since = comparable_since(having[-1], key)  # earlier scores are of other rewards, or of another set
    having = [line for line in having if comparable_since(line, key) == since]
    best = (min if key == HELD_OUT_LOSS else max)(having, key=lambda line: line[key])
    scores = [score_text(line[key], line.get(f"{key}_error", math.nan)) for line in (having[0], having[-1], best)]
    rates = sorted(line["perf/samples_per_s"] for line in run.lines if "perf/samples_per_s" in line)
    greedy = score_text(having[-1].get(key.removesuffix("reward") + "greedy"))
    return [name, steps, key, *scores, str(version_of(best)), greedy, f"{rates[len(rates) // 2]:,.1f}" if rates else ""]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sluice report", description="Writes a run's report.html; of several runs, a page that compares them."
    )
    parser.add_argument(
        "run_dirs", type=Path, metavar="RUN_DIR", nargs="+", help="a run's folder, such as runs/quickstart"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder with tokenizer.json (default: the run's policy.model)"
    )
    options = parser.parse_args(arguments)
    folders = options.run_dirs
    try:
        print(write_report(folders[0], options.tokenizer) if len(folders) == 1 else write_comparison(folders))
    except OperatorError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _read(folder: Path) -> RunFacts:
    if not folder.is_dir():
        raise OperatorError(f"{folder} is not a folder. Give a run's folder, such as runs/NAME.")
    if (folder / "MANIFEST.json").exists():  # another file in it would break the checkpoint
        raise OperatorError(f"{folder} is a checkpoint. Give its run's folder, {folder.absolute().parent.parent}.")
    if not any((folder / name).exists() for name in _RECORDS):
        raise OperatorError(f"{folder} is not a run's folder: it has none of {', '.join(_RECORDS)}. Give runs/NAME.")
    return read_run(folder)


def _shares(times: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """Return (part, share) of the measured time, largest first."""
    totals = {key: sum(each[key] for each in times) for key in (times[0] if times else ())}
    whole = sum(totals.values())
    names = {"time/wait_s": "waiting for data", "time/train_s": "training", "time/push_s": "pushing weights"}
    return sorted(((names[key], total / whole) for key, total in totals.items() if whole), key=lambda each: -each[1])


def _model_folder(run: RunFacts) -> Path | None:
    return Path(run.settings.policy.model) if run.settings and run.settings.policy.model else None


def _unused_endpoints(run: RunFacts) -> list[str]:
    """Return the names of the reward endpoints of weight 0."""
    return [each.name for each in run.settings.rewards.endpoints if each.weight == 0] if run.settings else []


def _write(path: Path, page: str) -> Path:
    """Write aside and rename: a reader who reloads the page never sees half of it."""
    cure = "Free the disk or give the folder write permission."
    with naming_disk_errors(f"{path} cannot be written", cure), replacing(path, writer=str(os.getpid())) as aside:
        aside.write_text(page, encoding="utf-8", errors="replace")
    return path
