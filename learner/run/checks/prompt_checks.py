"""The prompts of a run before it starts: the usable rows, the skipped rows and their reasons."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from learner.data.prompt_index import PromptIndex
from learner.data.prompt_order import order_name
from learner.data.prompt_reading import RowName, UnusableRow, read_prompts
from learner.data.prompt_set import PromptSet
from learner.data.sft_forms import describe_forms
from learner.disk.run_folder import SKIPPED_ROWS, TRAIN_INDEX, SkippedRow, read_skipped, write_skipped
from learner.run.checks.prompt_judge import DemonstrationJudge, PromptJudge
from learner.run.start import RunStart
from protocol.disk.files import naming_disk_errors
from protocol.errors import SettingsError
from protocol.settings.data import DataEntry, DataSettings, entries_of, in_words
from protocol.settings.settings import Settings

_NUM_FIRST = 16  # rows that are read for a notice


@dataclass(frozen=True)
class TrainPrompts:
    """data.train, read once."""

    index: PromptIndex  # place of each usable row
    skipped: tuple[SkippedRow, ...]  # rows that are not used
    notice: str | None  # message for the user; None: all rows are usable
    longest: int  # tokens of the longest row that is learnt without generating; 0: prompts

    def first_row(self, data: DataSettings) -> dict[str, Any]:
        """Return the first usable row's prompt, label and columns. Raises: OperatorError when its file has changed."""
        first = PromptSet(self.index, entries_of(data.train), data)[0]
        return {"prompt": first.prompt, "label": first.label, "columns": first.columns}

    def save(self, folder: Path) -> None:
        """Save them in the run folder: the coordinator reads no row again; audit and resume skip the same rows.

        Raises: OperatorError when it cannot be written.
        """
        with naming_disk_errors(f"The run folder {folder} cannot be written", "Free the disk, then run again."):
            self.index.save(folder / TRAIN_INDEX)
            write_skipped(folder, self.skipped)


@dataclass(frozen=True)
class JudgedRows:
    """Every row of data.train, judged."""

    index: PromptIndex  # place of each usable row
    unusable: list[UnusableRow]
    notice: str = ""  # sentences: forms of demonstrations, tools of prompts that are not shown, a missing end token
    longest: int = 0  # tokens of the longest demonstration


def read_train_prompts(
    settings: Settings, model: Path, start: RunStart, judged: JudgedRows | None = None
) -> TrainPrompts:
    """Return the prompts of data.train. A resumed run skips exactly the rows that it skipped at its beginning.

    judged: the rows without those skipped before, if they have been read.
    Raises: SettingsError for a file that cannot be read, and for more unusable rows than data.max_skipped_share.
    """
    data = settings.data
    before = skipped_before(start)
    judged = judged or _judge_rows(settings, model, before)
    index, unusable, notice = judged.index, judged.unusable, judged.notice
    num_rows = len(index) + len(unusable)
    if unusable and start.checkpoint is not None:
        raise SettingsError(
            f"data: {unusable[0]} This run began with {len(unusable)} of {num_rows} rows that are "
            "unusable now. Give its first file and settings, or choose another run.name."
        )
    _check_unusable(settings, len(index), unusable)
    order_name(index.rows_by_entry, data.weights(), data.shuffle)  # refuses a weight that does not fit any order
    skipped = tuple(
        sorted([*before, *(SkippedRow(one.row.file, one.row.number, one.refusal.reason) for one in unusable)])
    )
    if skipped:
        file, number, reason = skipped[0]
        of_file = f"{file} " if len(index.files) > 1 else ""
        notice += (
            f"{len(skipped)} of {len(index) + len(skipped)} rows of {in_words(data.train)} are left out: {of_file}line "
            f"{number} {reason} All of them: {SKIPPED_ROWS} in the run folder."
        )
    return TrainPrompts(index, skipped, notice.strip() or None, judged.longest)


def skipped_before(start: RunStart) -> list[SkippedRow]:
    """Return the rows that the run skips since its beginning."""
    return read_skipped(start.checkpoint.path.parent.parent) if start.checkpoint else []


def settings_of_epochs(
    settings: Settings, model: Path, before: Sequence[SkippedRow] = ()
) -> tuple[Settings, JudgedRows | None]:
    """Return the settings with run.max_steps for run.max_epochs passes over data.train, and its rows if they were read.

    Only usable rows count. before: rows that the run skips already.
    """
    epochs = settings.run.max_epochs
    if epochs is None:
        return settings, None
    judged = _judge_rows(settings, model, before)
    steps = math.ceil(round(epochs * len(judged.index) / settings.learner.groups_per_step, 9))
    run = settings.run.model_copy(update={"max_steps": steps, "max_epochs": None})
    return settings.model_copy(update={"run": run}), judged


def _judge_rows(settings: Settings, model: Path, before: Sequence[SkippedRow]) -> JudgedRows:
    data, without = settings.data, [RowName(row.file, row.number) for row in before]
    with _judge_of(settings, model, data.max_prompt_tokens) as judge:
        index, unusable = read_prompts(data.train, data, judge, without)
        no_end = judge.notice_end()
    _check_others(settings, "data.train", len(index))
    notice = (
        f"data.train has {describe_forms(judge.forms)}. " if judge.forms else _unused_tools(settings, data.train, index)
    )
    return JudgedRows(index, unusable, notice + no_end, judge.longest)


def _unused_tools(settings: Settings, given: str | Sequence[str | DataEntry], index: PromptIndex) -> str:
    """Return a sentence for first rows with tools that a bundled environment does not read; empty: there are none."""
    environment = settings.rollout.environment
    if settings.is_of_rows or environment not in ("single_turn", "search", "tools"):
        return ""
    first = PromptSet(index, entries_of(given), settings.data)[:_NUM_FIRST]
    if all(prompt.columns.get("tools") in (None, [], "", "[]") for prompt in first):
        return ""
    return (
        f"{in_words(given)} has the column tools, which rollout.environment = {environment} does not "
        "give to the chat template. To have calls run, set it to tools and name them in tools.names, tools.http or "
        "tools.mcp. To show each row's tools alone, let reset of an environment of yours return Chat(messages, tools). "
    )


def _judge_of(
    settings: Settings, model: Path, max_prompt_tokens: int | None = None
) -> DemonstrationJudge | PromptJudge:
    if not settings.is_of_rows:
        return PromptJudge(model, settings, max_prompt_tokens)
    trust = settings.policy.trust_remote_code
    return DemonstrationJudge(model, settings.data.form, trust_remote_code=trust)


class HeldOutRows(NamedTuple):
    """All held-out sets."""

    longest: int  # tokens of the longest row that is scored without generating; 0: prompts
    notices: list[str]  # sentences for sets with rows that the policy learns from, or with tools that it never sees


def check_held_out(settings: Settings, model: Path, train: PromptIndex | None = None) -> HeldOutRows:
    """Return the facts of the held-out sets. train: rows of data.train; None: there are none.

    Raises: SettingsError when a held-out row is unusable: the mean over the others would be another figure.
    """
    longest, notices, usual = 0, [], settings.eval.num_prompts
    sets = [(settings.data.eval, usual), *((one.data, one.num_prompts or usual) for one in settings.eval.sets)]
    for given, most in sets:
        if given:
            with _judge_of(settings, model) as judge:
                index, unusable = read_prompts(given, settings.data.of_held_out(), judge)
            if unusable:
                raise SettingsError(f"data: {unusable[0]}")
            num_scored = min(len(index), most)
            _check_others(settings, "data.eval", num_scored)
            longest = max(longest, judge.longest)
            if tools := _unused_tools(settings, given, index):
                notices.append(tools.rstrip())
            if train is not None and settings.eval.every_steps and (num := _num_learnt(index, most, train)):
                notices.append(
                    f"{num} of the {num_scored} rows of {in_words(given)} are in data.train too: their scores are of "
                    "rows that the policy learns from. Give held-out rows."
                )
    return HeldOutRows(longest, notices)


def _num_learnt(held_out: PromptIndex, most: int, train: PromptIndex) -> int:
    """Return how many of the first rows of a held-out set have an equal row in data.train, in whatever file."""
    scored, learnt = (each.row_hashes.view(np.uint64).ravel() for each in (held_out, train))
    return int(np.isin(scored[:most], learnt).sum())


def _check_others(settings: Settings, name: str, num_rows: int) -> None:
    if settings.objective == "kto" and num_rows == 1:
        raise SettingsError(
            f"data: {name} has one row to use, and objective = kto needs another row's answer to compare it with. "
            "Give at least 2 rows."
        )


def _check_unusable(settings: Settings, num_used: int, unusable: Sequence[UnusableRow]) -> None:
    """Raise SettingsError for more unusable rows than the settings allow."""
    num_rows, share = num_used + len(unusable), settings.data.max_skipped_share
    named = in_words(settings.data.train)
    if not unusable:
        return
    if num_rows == 1:
        raise SettingsError(f"data: {unusable[0]}")
    if not num_used:
        raise SettingsError(
            f"data: none of the {num_rows} rows of {named} can be used. The first, {_place(unusable)}, "
            f"{unusable[0].refusal.reason}"
        )
    if settings.data.overlong == "refuse" and (overlong := [one for one in unusable if one.refusal.is_overlong]):
        raise SettingsError(f"data: {overlong[0]} With data.overlong = skip such rows are left out ({len(overlong)}).")
    mistaken = [one for one in unusable if not one.refusal.is_by_setting]
    # Divided, not multiplied: 0.29 * 100 is less than 29.
    if len(mistaken) / num_rows > share:
        raise SettingsError(
            f"data: {len(mistaken)} of {num_rows} rows of {named} cannot be used, more than data.max_skipped_share = "
            f"{share:g} allows. The first, {_place(mistaken)}, {mistaken[0].refusal.reason}"
        )


def _place(rows: Sequence[UnusableRow]) -> str:
    """Return the line of the first row, and its file if the rows are from several."""
    row = rows[0].row
    return f"line {row.number}" if len({one.row.file for one in rows}) == 1 else f"{row.file} line {row.number}"
