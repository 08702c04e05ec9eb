"""Every row of a data set read once: which are used, where they lie, and what is wrong with the others."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from learner.data.files import RowFile, find_files
from learner.data.prompt_index import IndexBuilder, PromptIndex
from learner.data.prompt_rows import each_row
from learner.data.prompt_shape import PromptShape, shape_of
from learner.data.prompts import Prompt, UnsendableRowError, make_prompt
from protocol.errors import SettingsError
from protocol.settings.data import DataEntry, DataSettings, entries_of

_JUDGED_AT_ONCE = 4096
_NO_LIMIT = 1 << 62


class RowName(NamedTuple):
    """Which row: of a file, by the name that the data set gives it ("" of its only one), the line counted from 1."""

    file: str
    number: int


class Refusal(NamedTuple):
    """Why a prompt is not used."""

    reason: str  # to stand behind the row's place
    is_overlong: bool = False  # it has too many tokens
    is_asked_for: bool = False  # more than data.max_prompt_tokens, and not more than the context has room for


class UnusableRow(NamedTuple):
    """A row that is not used. Its text is the row's place and what is wrong."""

    path: Path
    row: RowName
    refusal: Refusal

    def __str__(self) -> str:
        return f"{self.path} line {self.row.number} {self.refusal.reason}"


# Returns why each of these prompts cannot be used, or None.
Judge = Callable[[Sequence[Prompt]], Sequence[Refusal | None]]


def read_prompts(
    given: str | Sequence[str | DataEntry],
    data: DataSettings,
    judge: Judge | None = None,
    without: Collection[RowName] = (),
) -> tuple[PromptIndex, list[UnusableRow]]:
    """Return the index of a data set's usable prompts, and each other row with what is wrong with it.

    judge: says what is wrong with prompts that could be sent. without: rows that are left out unread.
    Raises: SettingsError for a missing or empty file, a line that is no JSON, a row without prompt or label.
    """
    entries = entries_of(given)
    files = find_files(entries)
    reading = _Reading(said_of(given, data), judge, without, data.max_prompts)
    for number, entry in enumerate(entries):
        reading.read([file for file in files if file.entry == number], shape_of(data, entry), entry.max_prompts)
    return reading.finish(files)


def said_of(given: str | Sequence[str | DataEntry], data: DataSettings) -> str:
    """Return what the settings say of a data set, as text: another text, another index."""
    entries = [entry.model_dump(mode="json") for entry in entries_of(given)]
    shape = data.model_dump(mode="json", exclude={"train", "eval", "curriculum", "shuffle", "max_skipped_share"})
    return json.dumps([entries, shape], sort_keys=True)


class _Reading:
    """Goes through the entries one by one. Rows are judged in batches; a limit ends an entry's reading, or all."""

    def __init__(self, said: str, judge: Judge | None, without: Collection[RowName], max_prompts: int | None) -> None:
        self._builder = IndexBuilder(said)
        self._judge = judge
        self._left_out: dict[str, set[int]] = {}
        for row in without:
            self._left_out.setdefault(row.file, set()).add(row.number)
        self._room = _NO_LIMIT if max_prompts is None else max_prompts  # prompts that may still be used
        self._unusable: list[UnusableRow] = []
        self._dropped: list[int] = []  # places that the builder knows and the index leaves out
        self._waiting: list[tuple[Path, RowName, int, Prompt]] = []

    def read(self, files: Sequence[RowFile], shape: PromptShape, max_prompts: int | None) -> None:
        """Read an entry's files, until it has given as many prompts as it may."""
        others = self._room
        self._room = mine = others if max_prompts is None else min(others, max_prompts)
        for file in files:
            self._builder.begin(file)
            if self._room:
                self._read_file(file, shape)
        self._room += others - mine

    def finish(self, files: Sequence[RowFile]) -> tuple[PromptIndex, list[UnusableRow]]:
        """Return the index and the unusable rows. Raises: SettingsError for a data set without a row."""
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
            place = self._builder.add(row.number, row.offset, prompt.uid)
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
