"""Reading every row of a data set once: an index of the usable rows, and a reason for each of the others."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from learner.data.files import RowFile, find_files
from learner.data.prompt_index import IndexBuilder, PromptIndex
from learner.data.prompt_rows import each_row
from learner.data.prompts import Prompt, PromptShape, UnsendableRowError, make_prompt, shape_of
from protocol.errors import SettingsError
from protocol.settings.data import DataEntry, DataSettings, entries_of

_JUDGED_AT_ONCE = 4096
_NO_LIMIT = 1 << 62
_INDEX_VERSION = 3  # raised when the same rows get another index


class RowName(NamedTuple):
    file: str  # file's name in the data set; "" for its only file
    number: int  # line or row, from 1


class Refusal(NamedTuple):
    """The reason why a prompt is skipped."""

    reason: str  # text to follow the row's place
    is_overlong: bool = False  # the prompt has too many tokens
    is_by_setting: bool = False  # the limit is data.max_prompt_tokens; False: the model's context


class UnusableRow(NamedTuple):
    """A skipped row. Its str() is the row's place and the reason."""

    path: Path
    row: RowName
    refusal: Refusal

    def __str__(self) -> str:
        return f"{self.path} line {self.row.number} {self.refusal.reason}"


# Returns the reason to skip each of these prompts, or None.
Judge = Callable[[Sequence[Prompt]], Sequence[Refusal | None]]


def read_prompts(
    given: str | Sequence[str | DataEntry],
    data: DataSettings,
    judge: Judge | None = None,
    without: Collection[RowName] = (),
) -> tuple[PromptIndex, list[UnusableRow]]:
    """Return the index of a data set's usable prompts, and the other rows with their reasons.

    judge: refuses prompts that could be sent but not sampled. without: rows to skip unread.
    Raises: SettingsError for a missing or empty file, a line that is not JSON, a row without prompt or label.
    """
    entries = entries_of(given)
    files = find_files(entries)
    reading = _Reading(index_key(given, data), judge, without, data.max_prompts)
    for number, entry in enumerate(entries):
        reading.read([file for file in files if file.entry == number], shape_of(data, entry), entry.max_prompts)
    return reading.finish(files)


def index_key(given: str | Sequence[str | DataEntry], data: DataSettings) -> str:
    """Return the settings of a data set as text. An index is valid only for the same text."""
    entries = [entry.model_dump(mode="json") for entry in entries_of(given)]
    shape = data.model_dump(mode="json", exclude={"train", "eval", "curriculum", "shuffle", "max_skipped_share"})
    return json.dumps([entries, shape, _INDEX_VERSION], sort_keys=True)


class _Reading:
    """Reads entry by entry and judges rows in batches, until the limit of an entry or of the data set."""

    def __init__(self, key: str, judge: Judge | None, without: Collection[RowName], max_prompts: int | None) -> None:
        self._builder = IndexBuilder(key)
        self._judge = judge
        self._left_out: dict[str, set[int]] = {}
        for row in without:
            self._left_out.setdefault(row.file, set()).add(row.number)
        self._room = _NO_LIMIT if max_prompts is None else max_prompts  # remaining number of prompts
        self._unusable: list[UnusableRow] = []
        self._dropped: list[int] = []  # places of refused prompts
        self._waiting: list[tuple[Path, RowName, int, Prompt]] = []

    def read(self, files: Sequence[RowFile], shape: PromptShape, max_prompts: int | None) -> None:
        """Read an entry's files, up to the limit of the entry and of the data set."""
        others = self._room
        self._room = mine = others if max_prompts is None else min(others, max_prompts)
        for file in files:
            self._builder.begin(file)
            if self._room:
                self._read_file(file, shape)
        self._room += others - mine

    def finish(self, files: Sequence[RowFile]) -> tuple[PromptIndex, list[UnusableRow]]:
        """Return the index and the unusable rows. Raises: SettingsError for a data set without rows."""
        index = self._builder.finish(without=self._dropped)
        if not len(index) and not self._unusable:
            named = str(files[0].path) if len(files) == 1 else f"{files[0].path} and {len(files) - 1} other files"
            has = "has" if len(files) == 1 else "have"
            raise SettingsError(f"data: {named} {has} no rows. A run needs at least one prompt.")
        return index, self._unusable

    def _read_file(self, file: RowFile, shape: PromptShape) -> None:
        left_out = self._left_out.get(file.name, set()) | self._left_out.get("", set())
        path, name = str(file.path), file.name
        for row in each_row(file.path):
            if row.number in left_out:
                continue
            try:
                prompt = make_prompt(row, path, name, shape)
            except UnsendableRowError as error:
                self._unusable.append(UnusableRow(file.path, RowName(name, row.number), Refusal(str(error))))
                continue
            place = self._builder.add(row.number, row.offset, prompt.uid, prompt.row_hash)
            if self._judge is None:
                self._room -= 1
            else:
                self._waiting.append((file.path, RowName(name, row.number), place, prompt))
                if len(self._waiting) >= min(self._room, _JUDGED_AT_ONCE):
                    self._judge_waiting(self._judge)
            if not self._room:
                return
        if self._judge is not None:
            self._judge_waiting(self._judge)

    def _judge_waiting(self, judge: Judge) -> None:
        verdicts = judge([prompt for *_, prompt in self._waiting])
        for (path, name, place, _), refusal in zip(self._waiting, verdicts, strict=True):
            if refusal is None:
                self._room -= 1
            else:
                self._unusable.append(UnusableRow(path, name, refusal))
                self._dropped.append(place)
        self._waiting.clear()
