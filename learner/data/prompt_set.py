"""A data set of prompts whose texts stay in their file: known by their places and uids, read one by one.

A million rows of 1.7 kB are an index of 26 MB here, where their texts as Python objects take 4 GB.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload
from zipfile import BadZipFile

from learner.data.prompt_index import IndexBuilder, PromptIndex, load_index
from learner.data.prompt_rows import Row, RowReader, each_row, open_rows
from learner.data.prompts import Prompt, UnsendableRowError, make_prompt
from protocol.errors import OperatorError, SettingsError
from protocol.settings.data import DataSettings

# Returns why each of these prompts cannot be used, or None.
Judge = Callable[[Sequence[Prompt]], Sequence[str | None]]
_JUDGED_AT_ONCE = 4096


class PromptSet(Sequence[Prompt]):
    """The prompts of one file, in file order."""

    def __init__(self, file: Path, data: DataSettings, index: PromptIndex) -> None:
        self._file = file
        self._data = data
        self._index = index
        self._rows: RowReader = open_rows(file)

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        """Return the prompt of a place. Raises: OperatorError when the file was changed in the meantime."""
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        number, offset = int(self._index.numbers[place]), int(self._index.offsets[place])
        row = Row(number, offset, self._rows.read(number, offset))
        prompt = make_prompt(row, str(self._file), self._file.name, self._data)
        if prompt.uid != self.uid(place):
            raise OperatorError(
                f"data: {self._file} line {number} was changed while the run uses the file. Put it back as it was."
            )
        return prompt

    def __iter__(self) -> Iterator[Prompt]:
        return (self[place] for place in range(len(self)))

    def uid(self, place: int) -> str:
        """Return a prompt's uid without reading its row."""
        return self._index.uid(place)

    @property
    def uids(self) -> list[str]:
        return [self.uid(place) for place in range(len(self))]

    @property
    def digest(self) -> str:
        """Hash over all uids in their order."""
        return self._index.digest()

    def find(self, uids: Sequence[str]) -> dict[str, Prompt]:
        """Return the prompts of these uids, as far as they are here."""
        return {uid: self[place] for uid, place in self._index.places(uids).items()}


def read_prompts(
    path: str, data: DataSettings, judge: Judge | None = None, without: Sequence[int] = ()
) -> tuple[PromptIndex, list[tuple[int, str]]]:
    """Return the index of a file's usable prompts, and each other row's number with what is wrong with it.

    judge: says what is wrong with prompts that could be sent. without: rows that are left out unread.
    Raises: SettingsError for a missing or empty file, a line that is no JSON, a row without prompt or label.
    """
    file = existing_file(path)
    builder = IndexBuilder(file)
    unusable: list[tuple[int, str]] = []
    waiting: list[tuple[int, Prompt]] = []
    left_out = frozenset(without)

    def judge_waiting() -> None:
        verdicts = judge([prompt for _, prompt in waiting]) if judge is not None else [None] * len(waiting)
        unusable.extend(
            (number, reason) for (number, _), reason in zip(waiting, verdicts, strict=True) if reason is not None
        )
        waiting.clear()

    for row in each_row(file):
        if row.number in left_out:
            continue
        try:
            prompt = make_prompt(row, path, file.name, data)
        except UnsendableRowError as error:
            unusable.append((row.number, str(error)))
            continue
        builder.add(row.number, row.offset, prompt.uid)
        waiting.append((row.number, prompt))
        if len(waiting) == _JUDGED_AT_ONCE:
            judge_waiting()
    judge_waiting()
    index = builder.finish(without=[number for number, _ in unusable])
    if not len(index) and not unusable:
        raise SettingsError(f"data: {path} has no rows. A run needs at least one prompt.")
    return index, sorted(unusable)


def load_prompts(path: str, data: DataSettings, without: Sequence[int] = ()) -> PromptSet:
    """Return every prompt of a file, in file order. without: rows that are left out unread.

    Raises: as `read_prompts`, and SettingsError for the first row that cannot be used.
    """
    index, unusable = read_prompts(path, data, without=without)
    if unusable:
        number, reason = unusable[0]
        raise SettingsError(f"data: {path} line {number} {reason}")
    return PromptSet(Path(path), data, index)


def open_prompts(path: str, data: DataSettings, index_path: Path, without: Sequence[int] = ()) -> Sequence[Prompt]:
    """Return the prompts of a file by an index of it that lies there, without reading them; read anew if it is not of
    the file as it is now, or is none.

    without: rows that the index leaves out. A file that was copied over itself has a new time and the same rows.
    Raises: as `load_prompts`.
    """
    file = existing_file(path)
    try:
        index = load_index(index_path)
    except (OSError, ValueError, KeyError, BadZipFile):
        return load_prompts(path, data, without)
    return PromptSet(file, data, index) if index.is_of(file) else load_prompts(path, data, without)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return a hash over all uids in their order."""
    if isinstance(prompts, PromptSet):
        return prompts.digest
    return hashlib.sha256("\n".join(prompt.uid for prompt in prompts).encode()).hexdigest()


def find_prompts(prompts: Sequence[Prompt], uids: Sequence[str]) -> dict[str, Prompt]:
    """Return the prompts of these uids, as far as they are here."""
    if isinstance(prompts, PromptSet):
        return prompts.find(uids)
    wanted = frozenset(uids)
    return {prompt.uid: prompt for prompt in prompts if prompt.uid in wanted}


def existing_file(path: str) -> Path:
    """Return the path of a data set. Raises: SettingsError when none is named, or it is no file."""
    if not path:
        raise SettingsError("settings: data.train is not set. Give a JSONL or Parquet file of prompts.")
    file = Path(path)
    if not file.is_file():
        raise SettingsError(f"data: {path} does not exist. Give a JSONL or Parquet file as data.train or data.eval.")
    return file
