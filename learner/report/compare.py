"""Several runs side by side: their scores, the settings that differ, and the same metrics as curves of one plot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learner.disk.run_folder import comparable_since, main_set
from learner.report.facts import RunFacts, settings_table
from learner.report.headline import HELD_OUT_LOSS, score_text, version_of
from learner.report.plots import Plot, compared_plots

# Settings that name a run and change nothing about it.
_NAMES = ("run.name", "run.dir")
COLUMNS = ("run", "steps", "score", "first", "last", "best", "at step", "last greedy", "samples/s")
_DATA = ("data.eval", "eval.num_prompts", "eval.samples")


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
