"""`sluice replay RUN STEP`: a kept step trained again on this machine, without a cluster.

Exit status: 0 when every figure has the recorded bits; 1 when one differs or none is recorded; 2 for a wrong option.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from learner.checkpoint.folder import newest_valid
from learner.disk.run_folder import CHECKPOINTS
from protocol.errors import NeighbourError, OperatorError, SettingsError
from protocol.settings.learner import AlgorithmSettings
from protocol.settings.loader import describe_settings, load_saved_settings, load_settings
from protocol.settings.settings import Settings

if TYPE_CHECKING:
    from learner.rank.replay.kept_steps import KeptOutcome
    from learner.rank.replay.ranks import Job, ReplayResult

_ABOUT = """\
Train a kept step again from the newest checkpoint before it, and compare its loss, gradient norm and other figures
with the recorded ones, bit for bit. A run keeps steps with learner.keep_batches. --with shows the same batch under
other settings of the loss: --with learner.loss=gspo --with kl.coefficient=0.01."""
_WIDEST = 120  # columns of the widest table
# What decides the loss of a batch that is already chosen, scored and packed.
_SECTIONS = ("kl.", "loss.", "preference.", "distill.", "critic.", "reference.")
_SETTINGS = {
    *(f"learner.{name}" for name in AlgorithmSettings.model_fields),
    *(f"learner.{name}" for name in ("lr", "num_epochs", "max_grad_norm", "router_aux_loss", "equal_groups")),
    *(f"rewards.{name}" for name in ("credit", "clip", "normalize", "truncated", "truncated_penalty")),
    *(f"rewards.overlong_{name}" for name in ("buffer_tokens", "penalty", "max_tokens")),
    "policy.old_logprobs",
}


@dataclass(frozen=True)
class Figure:
    """One figure of a step."""

    name: str  # key in metrics.jsonl
    recorded: float | None  # exact value of the run; None: it has none
    replayed: float | None
    changed: float | None  # value with the other settings

    @property
    def is_equal(self) -> bool:
        return repr(self.recorded) == repr(self.replayed)  # NaN equals NaN


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("sluice replay", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run, such as runs/NAME")
    parser.add_argument("step", type=int, metavar="STEP", help="number of a kept step")
    about = "another setting of the last step; may be repeated"
    parser.add_argument("--with", dest="changes", action="append", default=[], metavar="SETTING=VALUE", help=about)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="sluice-replay-") as scratch:
        return _replay(options.run_dir, options.step, options.changes, Path(scratch), is_json=options.json)


def _replay(run: Path, step: int, changes: Sequence[str], scratch: Path, *, is_json: bool) -> int:
    # They import torch, which takes seconds.
    from learner.rank.replay.kept_steps import describe_machine, read_outcome, read_share
    from learner.rank.replay.ranks import replay_on_ranks

    job = plan_replay(run, step, changes, scratch)
    recorded, share = read_outcome(job.steps[-1]), read_share(job.steps[-1], 0)
    try:
        found = replay_on_ranks(job)
    except NeighbourError as error:
        raise OperatorError(str(error)) from None
    figures = figures_of(recorded, found)
    is_equal = recorded is not None and all(figure.is_equal for figure in figures)
    if is_json:
        facts = {"is_equal": is_equal, "has_served_weights": found.has_served_weights, "notes": found.notes}
        print(json.dumps({"step": step, **facts, "figures": [asdict(figure) for figure in figures]}))
        return 0 if is_equal else 1
    show(figures, job.differences)
    beginning = f"{job.checkpoint.path}" if job.checkpoint else "the run's first models"
    print(f"From {beginning} through {len(job.steps)} kept step{'s' if len(job.steps) > 1 else ''}.")
    for note in found.notes:
        print(f"note: {note}")
    if found.has_served_weights is not None:
        print(f"The weights before the step {'are' if found.has_served_weights else 'are not'} those of the servers.")
    if recorded is None:
        print("The run recorded no figures: it crashed in this step, or is still in it.")
    elif is_equal:
        print("Equal: every figure has the recorded bits.")
    else:
        print(f"Not equal. Recorded with {share.machine}; replayed with {describe_machine()}.")
    return 0 if is_equal else 1


def plan_replay(run: Path, step: int, changes: Sequence[str], scratch: Path) -> "Job":
    """Return what replays a step: the kept steps after the newest checkpoint before it, up to the step itself.

    changes: SETTING=VALUE each. scratch: an empty folder. Raises: OperatorError for a gap, SettingsError for a change.
    """
    from learner.rank.replay.kept_steps import FOLDER, kept_steps, read_share
    from learner.rank.replay.ranks import Job

    kept = kept_steps(run / FOLDER)
    if step not in kept:
        has = f"it has steps {min(kept)} to {max(kept)}" if kept else "it kept none (learner.keep_batches)"
        raise OperatorError(f"{run} has no kept step {step}: {has}. Name a kept step of a run's folder.")
    checkpoint = newest_valid(run / CHECKPOINTS, step - 1)
    first = checkpoint.step + 1 if checkpoint else 1
    if missing := [number for number in range(first, step) if number not in kept]:
        before = f"{checkpoint.path.name} is the newest valid checkpoint" if checkpoint else "no checkpoint is"
        raise OperatorError(
            f"Step {step} cannot be replayed: {before} before it, and step {missing[0]} was not kept. Name a step that "
            "kept steps join to a checkpoint, or raise learner.keep_batches in the next run."
        )
    share = read_share(kept[step], 0)
    (scratch / "settings.yaml").write_text(share.settings, encoding="utf-8")
    (scratch / "given.yaml").write_text(share.given, encoding="utf-8")
    settings = load_saved_settings(scratch / "settings.yaml")
    changed, differences = _change_settings(scratch / "given.yaml", changes) if changes else (None, {})
    steps = [kept[number] for number in range(first, step + 1)]
    return Job(steps, settings, changed, differences, checkpoint, scratch)


def _change_settings(given: Path, changes: Sequence[str]) -> tuple[Settings, dict[str, str]]:
    """Return the given settings with the changes of --with, and what that changes: a loss brings settings of its own.

    Raises: SettingsError as of sluice run.
    """
    options = []
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise SettingsError(f"--with {change} has no value. Write SETTING=VALUE, such as --with learner.loss=gspo.")
        options += [f"--{name}", value]
    before, changed = (load_settings(given, each, Path.cwd()) for each in ([], options))
    of_run = {name: value for name, value, _ in describe_settings(before)}
    differences = {name: value for name, value, _ in describe_settings(changed) if value != of_run[name]}
    _check_changes(differences)
    return changed, differences


def _check_changes(changed: dict[str, str]) -> None:
    """Raise SettingsError unless the settings decide the loss of a batch that is already chosen."""
    if not changed:
        raise SettingsError("--with changes nothing: the run had these values. Give another value.")
    for name, value in changed.items():
        if name not in _SETTINGS and not name.startswith(_SECTIONS):
            raise SettingsError(
                f"--with {name}={value} does not change the loss of a batch that is sampled, scored and packed. "
                "Change learner.advantage, loss, correction or their settings, kl, loss, critic, preference, distill, "
                "or the shaping of rewards."
            )


def figures_of(recorded: "KeptOutcome | None", found: "ReplayResult") -> list[Figure]:
    """Return the loss and gradient norm first. Held-out rows are not scored again."""
    outcomes = (recorded, found.outcome, found.changed)
    columns = [
        {} if each is None else {name: float(value) for name, value in each.metrics.items()} for each in outcomes
    ]
    names = dict.fromkeys(name for column in columns for name in column if not name.startswith("eval/"))
    first = sorted(names, key=lambda name: not name.endswith(("/loss", "/grad_norm")))
    return [Figure(name, *(column.get(name) for column in columns)) for name in first]


def show(figures: Sequence[Figure], differences: dict[str, str]) -> None:
    """Print the table with every digit. Equal figures beside changed ones need one column: the three are too wide."""
    columns: dict[str, Callable[[Figure], float | None]] = {
        "recorded": lambda figure: figure.recorded,
        "replayed": lambda figure: figure.replayed,
    }
    if differences:
        if all(figure.recorded is None or figure.is_equal for figure in figures):
            del columns["recorded"]
        columns["changed"] = lambda figure: figure.changed
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("figure", *columns):
        table.add_column(column, no_wrap=True)
    for figure in figures:
        values = [read(figure) for read in columns.values()]
        cells = ["" if value is None else repr(value) for value in values]
        table.add_row(figure.name, *cells, style="" if figure.is_equal else "bold")
    console = Console(markup=False, emoji=False, highlight=False)
    console.width = max(console.width, _WIDEST)
    console.print(table)
    if differences:
        console.print("Changed:", ", ".join(f"{name} = {value}" for name, value in differences.items()))
