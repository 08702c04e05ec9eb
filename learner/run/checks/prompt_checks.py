"""The prompts of a run before it starts: which are used, which are left out and why; what its folder says of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.data.prompt_index import PromptIndex
from learner.data.prompt_set import read_prompts
from learner.disk.layout import SKIPPED_ROWS, TRAIN_INDEX
from learner.disk.skipped_rows import read_skipped, write_skipped
from learner.run.checks.prompt_judge import PromptJudge
from learner.run.start import RunStart
from protocol.errors import SettingsError
from protocol.settings.settings import Settings


@dataclass(frozen=True)
class TrainPrompts:
    """data.train, read once."""

    index: PromptIndex  # where each row lies that can be used
    skipped: tuple[tuple[int, str], ...]  # number and reason of each row that is left out
    notice: str | None  # what the user should see of them

    def save(self, folder: Path) -> None:
        """Leave them in the run folder: the coordinator reads no row twice, the audit and a resume skip the same ones.

        Raises: OSError.
        """
        self.index.save(folder / TRAIN_INDEX)
        write_skipped(folder, self.skipped)


def read_train_prompts(settings: Settings, model: Path, start: RunStart) -> TrainPrompts:
    """Return the prompts of data.train. A run that goes on leaves out the rows that it began without, and no others.

    Raises: SettingsError for a file that cannot be read, and for more unusable rows than data.max_skipped_share.
    """
    path = settings.data.train
    before = read_skipped(start.checkpoint.path.parents[1]) if start.checkpoint else []
    with PromptJudge(model, settings) as judge:
        index, unusable = read_prompts(path, settings.data, judge, [number for number, _ in before])
    num_rows = len(index) + len(unusable)
    # Divided, not multiplied: 0.29 * 100 is less than 29. A run needs a prompt, whatever share may be left out.
    if unusable and start.checkpoint is not None:
        number, reason = unusable[0]
        raise SettingsError(
            f"data: {path} line {number} {reason} This run began with that row, {len(unusable)} such of {num_rows}: "
            "its accounts are of them. Give the file and settings that it began with, or choose another run.name."
        )
    if unusable and (len(unusable) / num_rows > settings.data.max_skipped_share or not len(index)):
        raise SettingsError(_too_many(path, unusable, num_rows, settings.data.max_skipped_share))
    skipped = tuple(sorted([*before, *unusable]))
    notice = None
    if skipped:
        number, reason = skipped[0]
        notice = (
            f"{len(skipped)} of {len(index) + len(skipped)} rows of {path} are left out: line {number} {reason} "
            f"All of them: {SKIPPED_ROWS} in the run folder."
        )
    return TrainPrompts(index, skipped, notice)


def check_held_out(settings: Settings, model: Path) -> None:
    """Raise SettingsError when a held-out row cannot be used: a mean over other rows would be another figure."""
    paths = {path for path in (settings.data.eval, *(one.data for one in settings.eval.sets)) if path is not None}
    for path in sorted(paths):
        with PromptJudge(model, settings) as judge:
            _, unusable = read_prompts(path, settings.data, judge)
        if unusable:
            raise SettingsError(f"data: {path} line {unusable[0][0]} {unusable[0][1]}")


def _too_many(path: str, unusable: Sequence[tuple[int, str]], num_rows: int, share: float) -> str:
    number, reason = unusable[0]
    if num_rows == 1:
        return f"data: {path} line {number} {reason}"
    if len(unusable) == num_rows:
        return f"data: none of the {num_rows} rows of {path} can be used. The first, line {number}, {reason}"
    return (
        f"data: {len(unusable)} of {num_rows} rows of {path} cannot be used, more than data.max_skipped_share = "
        f"{share:g} lets out. The first, line {number}, {reason}"
    )
