"""Writes a run's report.html, or a page that compares runs: files that open without a network.

A run may be finished, running, killed or empty.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from learner.live.alarms import alarms_of
from learner.live.panel import describe_slowness, step_times
from learner.report.compare import COLUMNS, compare_runs
from learner.report.facts import RunFacts, read_run, settings_table
from learner.report.headline import compared_steps, make_headline
from learner.report.page import render_page
from learner.report.plots import metric_plots, outside_band, reward_plot
from learner.report.samples import pair_answers, read_groups
from protocol.disk.files import replacing
from protocol.errors import OperatorError

_RECORDS = ("settings.yaml", "metrics.jsonl", "ledger.sqlite", "samples.jsonl")


def write_report(run_folder: Path, tokenizer_dir: Path | None) -> Path:
    """Write report.html into the run folder and return its path.

    tokenizer_dir: folder with tokenizer.json; None: policy.model of the run's settings, where that is a folder.
    Raises: OperatorError when run_folder is not a run's folder or cannot be written.
    """
    run = _read(run_folder)
    notes = list(run.notes)
    groups = read_groups(run_folder / "samples.jsonl", tokenizer_dir or _model_folder(run), notes)
    steps = compared_steps(run.lines)
    changes, pairs = pair_answers(run_folder / "evaluations.jsonl", *steps)
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
        steps=steps,
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


def main(arguments: Sequence[str]) -> int:
    """Return the command's exit status."""
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
    try:
        with replacing(path, writer=str(os.getpid())) as aside:
            aside.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise OperatorError(
            f"{path} cannot be written: {error.strerror}. Free the disk or give the folder write permission."
        ) from None
    return path
