"""`sluice run`: train a policy with the given settings, on the running cluster.

Exit status: 0 after all steps or SIGTERM; 1 with one sentence after a failure; 2 for a wrong setting, before anything
was started; 130 after Ctrl-C.
"""

import argparse
import logging
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from learner.run.detached import OPTION, start_detached
from learner.run.terminal import drop_unwritten
from protocol.errors import NeighbourError, OperatorError, SettingsError
from protocol.node.home import read_cluster, sluice_home
from protocol.settings.did_you_mean import likeliest_value
from protocol.settings.loader import describe_settings, load_settings, names_own_run, settings_help
from protocol.settings.section import Section
from protocol.settings.settings import Settings

_QUICK_START = "quickstart"
_QUICK_START_CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "configs" / "quickstart.yaml"
_RAY_COPIES = "working_dir_files"  # folder in which Ray puts the copies of `ray job submit --working-dir`
_ALL = "all"
# Every section; objective is a setting without one.
SECTIONS = [name for name in Settings.model_fields if name != "objective"]
USUAL = (
    "run.name",
    "run.max_steps",
    "policy.model",
    "data.train",
    "data.eval",
    "rewards.endpoints",
    "rollout.environment",
    "rollout.group_size",
    "rollout.max_response_tokens",
    "learner.groups_per_step",
    "learner.num_ranks",
    "learner.lr",
)
_WIDTH = 80
_LEFT = 32
_ABOUT = """\
Train a language model with reinforcement learning on the cluster that `sluice start` started.
A command with policy.model, data.train or a --config file is a run of your own and uses nothing of the quick start.
The quick start runs without them, or with --config quickstart. Give settings in the YAML file or on the
command line; lists and maps as JSON. Relative paths start at the current folder."""


def main(arguments: Sequence[str]) -> int:
    try:
        return _main(arguments)
    except BrokenPipeError:
        return 0  # the reader of --help or --plan has left
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except NeighbourError as error:
        # Its cause, if it is an exception of another kind, is a bug of ours in another process.
        is_bug = error.__cause__ is not None and not isinstance(error.__cause__, NeighbourError)
        note = _save_traceback(error) if is_bug else ""
        print(" ".join(str(error).split()) + note, file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(interrupt or "Interrupted before the first step: nothing is lost.", file=sys.stderr)
        return 130
    except Exception as error:  # a bug of ours: one sentence here, the traceback in a file
        sentence = f"learner.run failed with a bug of its own: {type(error).__name__}: {' '.join(str(error).split())}"
        print(f"{sentence}{_save_traceback(error)}", file=sys.stderr)
        return 1


def run_command(arguments: Sequence[str]) -> int:
    """Run the command and drop unwritten output; returns its exit status."""
    status = main(arguments)
    drop_unwritten()
    return status


class GivenOnce(argparse.Action):
    """An option that may stand once. Raises: SettingsError the second time; the last one would win in silence."""

    def __call__(self, _parser: Any, given: argparse.Namespace, value: Any, option: str | None = None) -> None:
        if (first := getattr(given, self.dest)) is not None:
            raise SettingsError(f"settings: {option} is given twice, as {first} and as {value}. Give one file.")
        setattr(given, self.dest, value)


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("sluice run", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action=GivenOnce, metavar="FILE", help=f"YAML file of settings, or {_QUICK_START}")
    parser.add_argument("--plan", action="store_true", help="print the place of each process, and stop")
    parser.add_argument("--cluster", metavar="FILE", help="with --plan: use the cluster that this file describes")
    parser.add_argument("--json", action="store_true", help="with --plan: print one JSON object")
    parser.add_argument("--forecast", metavar="RUN", help="with --plan: speed at each staleness, from a run or JSON")
    parser.add_argument("--long-tails", action="store_true", help="with --forecast: p99 is ten times the median length")
    parser.add_argument(OPTION, action="store_true", help="run in the background; sluice runs shows it")
    parser.add_argument(
        "-h", "--help", nargs="?", const="", metavar="SECTION", help=f"explain a section's settings; {_ALL}: every one"
    )
    own, options = parser.parse_known_args(arguments)
    if own.help is not None:
        about = "" if own.help else f"{_ABOUT}\n\n{parser.format_help()}\n"
        print(f"{about}{help_text(own.help)}")
        return 0
    if (own.cluster or own.json) and not own.plan:
        given = f"--cluster {own.cluster}" if own.cluster else "--json"
        raise SettingsError(f"settings: {given} belongs to --plan; a run starts on the running cluster. Add --plan.")
    if (own.forecast and (own.json or not own.plan)) or (own.long_tails and not own.forecast):
        raise SettingsError("settings: --forecast belongs to --plan without --json, and --long-tails to --forecast.")
    config = _config(own.config, options)
    settings = load_settings(config, options, Path.cwd())
    check_job_folder(settings, Path.cwd(), is_detached=own.no_wait)
    if config == _QUICK_START_CONFIG and not Path(settings.policy.model).is_dir():
        read_cluster()  # refuses a missing cluster, whose start makes the quick start's files
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)-5s %(name)s  %(message)s")
    # Imported late: --help and a wrong setting answer at once, without Ray.
    if own.plan:
        from learner.run.plan_command import plan

        topology = plan(settings, own.cluster and Path(own.cluster), as_json=own.json)
        if own.forecast:
            from learner.run.forecast import show_forecast

            show_forecast(settings, own.forecast, topology, has_long_tails=own.long_tails)
        return 0
    from learner.run.checks.preflight import check_run

    checked = check_run(settings, is_fetching=True)
    if own.no_wait:
        return start_detached(arguments, checked.start.folder)
    _show_settings(checked.settings)
    from learner.run.driver import drive

    return drive(checked)


def _config(given: str | None, options: Sequence[str]) -> Path | None:
    """Return the settings file of a command; None for a user's own run without one.

    The quick start's other settings, such as its warm start, would silently harm a user's model.
    """
    if given == _QUICK_START:
        return _QUICK_START_CONFIG
    if given is not None:
        return Path(given)
    return None if names_own_run(options) else _QUICK_START_CONFIG


def _show_settings(settings: Settings) -> None:
    """Print the settings that differ from their defaults; settings.yaml in the run folder has all of them."""
    table = Table("setting", "value", title="Settings that differ from their defaults", title_justify="left")
    for name, value, is_changed in describe_settings(settings):
        if is_changed:
            table.add_row(name, value)
    Console(markup=False, emoji=False).print(table)  # values are the user's: [/INST] is not markup


def _save_traceback(error: BaseException) -> str:
    """Write a traceback to a file, also that of another process; return a note with its path."""
    path = sluice_home() / "logs" / "learner_run.traceback"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="replace")
    except OSError as failure:
        return f" (its traceback could not be saved: {failure.strerror})"
    return f" (traceback: {path})"


def check_job_folder(settings: Settings, working_folder: Path, *, is_detached: bool = False) -> None:
    """Raise SettingsError where the run folder would be in Ray's copy of a job's folder, or the run outlive the job.

    Ray deletes that copy some time after the job. settings: with absolute paths. is_detached: --no-wait.
    """
    if _RAY_COPIES not in working_folder.parts:
        return
    if is_detached:
        raise SettingsError(
            "settings: --no-wait has the run outlive its Ray job, after which Ray deletes its copy of the job's folder."
            " Leave it out here; ray job submit has a --no-wait of its own."
        )
    folder = Path(settings.run.dir)
    if folder.is_relative_to(working_folder):
        raise SettingsError(
            f"settings: run.dir = {folder.relative_to(working_folder)} is in Ray's copy of the job's folder, which Ray "
            "deletes after the job. Give run.dir a whole path, such as --run.dir /data/runs."
        )


def help_text(section: str) -> str:
    """Return the settings of one section, such as learner or policy.lora, of `all`, or the usual ones for "".

    Raises: SettingsError for another name.
    """
    if section == _ALL:
        return settings_help().strip()
    if not section:
        return "\n".join(
            [
                "The twelve settings that most runs set:",
                *(line for name in USUAL for line in _describe(name)),
                "",
                *textwrap.wrap(
                    f"sluice run --help SECTION explains one of {', '.join(SECTIONS)}; "
                    f"sluice run --help {_ALL} explains every setting.",
                    _WIDTH,
                ),
            ]
        )
    groups = re.split(r"\n\n(?=\S+ options:\n)", settings_help().strip())
    if shown := [group for group in groups if re.match(rf"{re.escape(section)}[ .]", group)]:
        return "\n\n".join(shown)
    expected = f"expected one of {', '.join([_ALL, *SECTIONS])}"
    raise SettingsError(f"settings: --help {section}: {expected}.{likeliest_value(section, expected)}")


def _describe(name: str) -> Sequence[str]:
    section, key = name.split(".")
    kind = Settings.model_fields[section].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, Section)
    about = textwrap.wrap(kind.model_fields[key].description or "", _WIDTH - _LEFT)
    return [f"{f'  --{name}' if place == 0 else '':<{_LEFT}}{line}" for place, line in enumerate(about)]
