"""A data set of prompts. Texts stay in their files and are read one by one.

A million rows of 1.7 kB take an index of 34 MB in memory. Their texts as Python objects would take 4 GB.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import overload
from zipfile import BadZipFile

from learner.data.prompt_index import PromptIndex, load_index
from learner.data.prompt_reading import RowName, index_key, read_prompts
from learner.data.prompt_rows import Row, RowReader, open_rows
from learner.data.prompts import Prompt, make_prompt, shape_of
from protocol.errors import OperatorError, SettingsError
from protocol.settings.data import DataEntry, DataSettings, entries_of


class PromptSet(Sequence[Prompt]):
    """The prompts of some files, file by file and in each file's order."""

    def __init__(self, index: PromptIndex, entries: Sequence[DataEntry], data: DataSettings) -> None:
        self.row_index = index
        self._shapes = [shape_of(data, entry) for entry in entries]
        # Files are opened at the start, so that a file that replaces one later has no effect.
        self._rows: list[RowReader] = [open_rows(Path(file.path)) for file in index.files]

    def __len__(self) -> int:
        return len(self.row_index)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        """Return the prompt of a place. Raises: OperatorError when its file has changed."""
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        number, offset = int(self.row_index.numbers[place]), int(self.row_index.offsets[place])
        which = self.row_index.file_of(place)
        file = self.row_index.files[which]
        row = Row(number, offset, self._rows[which].read(number, offset))
        prompt = make_prompt(row, file.path, file.name, self._shapes[file.entry])
        if (prompt.uid, prompt.row_hash) != (self.row_index.uid(place), self.row_index.row_hash(place)):
            raise OperatorError(
                f"data: {file.path} line {number} was changed while the run uses the file. Put it back as it was."
            )
        return prompt

    def __iter__(self) -> Iterator[Prompt]:
        return (self[place] for place in range(len(self)))


def load_prompts(
    given: str | Sequence[str | DataEntry], data: DataSettings, without: Collection[RowName] = ()
) -> PromptSet:
    """Return every prompt of a data set, in order. without: rows to skip unread.

    Raises: as `read_prompts`, and SettingsError for the first row that cannot be used.
    """
    index, unusable = read_prompts(given, data, without=without)
    if unusable:
        raise SettingsError(f"data: {unusable[0]}")
    return PromptSet(index, entries_of(given), data)


def open_prompts(
    given: str | Sequence[str | DataEntry], data: DataSettings, index_path: Path, without: Collection[RowName] = ()
) -> PromptSet:
    """Return the prompts of a data set through the index at `index_path`. Reads the rows if the index is not current.

    without: rows that the index skips. Raises: as `load_prompts`.
    """
    try:
        index = load_index(index_path)
    except (OSError, TypeError, ValueError, KeyError, BadZipFile):
        return load_prompts(given, data, without)
    if not index.is_current(index_key(given, data)):
        return load_prompts(given, data, without)
    return PromptSet(index, entries_of(given), data)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return a hash over all uids in their order."""
    if isinstance(prompts, PromptSet):
        return prompts.row_index.digest()
    return hashlib.sha256("\n".join(prompt.uid for prompt in prompts).encode()).hexdigest()


def rows_digest(prompts: Sequence[Prompt]) -> str:
    """Return a hash over prompts, labels and columns in their order."""
    if isinstance(prompts, PromptSet):
        return prompts.row_index.rows_digest()
    return hashlib.sha256(b"".join(prompt.row_hash for prompt in prompts)).hexdigest()


def uid_at(prompts: Sequence[Prompt], place: int) -> str:
    """Return the uid of the prompt at a place, without reading a row of a PromptSet."""
    return prompts.row_index.uid(place) if isinstance(prompts, PromptSet) else prompts[place].uid


def rows_by_entry(prompts: Sequence[Prompt]) -> list[int]:
    """Return the number of prompts of each entry of data.train."""
    return prompts.row_index.rows_by_entry if isinstance(prompts, PromptSet) else [len(prompts)]


def find_prompts(prompts: Sequence[Prompt], uids: Sequence[str]) -> dict[str, Prompt]:
    """Return the prompts of those uids that are in the set."""
    if isinstance(prompts, PromptSet):
        return {uid: prompts[place] for uid, place in prompts.row_index.places(uids).items()}
    wanted = frozenset(uids)
    return {prompt.uid: prompt for prompt in prompts if prompt.uid in wanted}
