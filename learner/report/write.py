"""Writes a run's report.html: one file that opens without a network. `sluice report RUN_DIR`.

The run may be finished, running, killed or empty.
"""

import argparse
import base64
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from learner.live.alarms import alarms_of
from learner.report.facts import RunFacts, read_run, settings_table
from learner.report.headline import make_headline
from learner.report.plots import metric_plots, not_measured, reward_plot
from learner.report.samples import read_samples
from protocol.disk.files import replacing
from protocol.errors import OperatorError

_NUM_SAMPLES = 10
_FOLDER = Path(__file__).parent


def write_report(run_folder: Path, tokenizer_dir: Path | None) -> Path:
    """Write report.html into the run folder and return its path.

    tokenizer_dir: folder with tokenizer.json; None: policy.model of the run's settings, where that is a folder.
    Raises: OperatorError when run_folder is not a folder or cannot be written.
    """
    if not run_folder.is_dir():
        raise OperatorError(f"{run_folder} is not a folder. Give a run's folder, such as runs/NAME.")
    run = read_run(run_folder)
    notes = list(run.notes)
    samples = read_samples(run_folder / "samples.jsonl", tokenizer_dir or _model_folder(run), _NUM_SAMPLES, notes)
    scripts = [_asset("uplot/uPlot.iife.min.js"), _asset("plots.js")]
    page = _template().render(
        run=run,
        written_at=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        headline=make_headline(run),
        alarms=alarms_of(run.lines, run.settings.health) if run.settings else [],
        reward=reward_plot(run.lines),
        metrics=metric_plots(run.lines, _unused_endpoints(run)),
        not_measured=not_measured(run.lines),
        samples=samples,
        settings=settings_table(run.settings) if run.settings else [],
        notes=notes,
        style=_asset("uplot/uPlot.min.css"),
        scripts=scripts,
        script_digests=[_csp_digest(script) for script in scripts],
    )
    return _write(run_folder / "report.html", page)


def main(arguments: Sequence[str]) -> int:
    """Return the command's exit status."""
    parser = argparse.ArgumentParser(prog="sluice report", description="Writes a run's report.html.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder, such as runs/quickstart")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder with tokenizer.json (default: the run's policy.model)"
    )
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run_dir, options.tokenizer))
    except OperatorError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _model_folder(run: RunFacts) -> Path | None:
    return Path(run.settings.policy.model) if run.settings and run.settings.policy.model else None


def _unused_endpoints(run: RunFacts) -> list[str]:
    """Return the names of the reward endpoints of weight 0."""
    return [each.name for each in run.settings.rewards.endpoints if each.weight == 0] if run.settings else []


def _asset(name: str) -> Markup:
    """Return a file of ours, to be written into the page as it is."""
    return Markup((_FOLDER / name).read_text(encoding="utf-8").strip())  # noqa: S704  # files of ours


def _csp_digest(script: str) -> str:
    """Return the script's digest for the page's Content-Security-Policy: a browser runs no other script there."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _template() -> Template:
    # Everything that came from a model, a data set or another process is escaped: autoescape, and no |safe anywhere.
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")


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
