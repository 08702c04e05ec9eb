"""Which files hold the rows of a data set, in order: of paths, patterns, folders, names on the Hugging Face hub."""

import glob
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from learner.data.hub_files import fetch
from protocol.errors import SettingsError
from protocol.settings.data import HUB_PREFIX, DataEntry

# Each is an open file, and Parquet files are in memory, while a run goes on.
_MAX_FILES = 512
_SUFFIXES = (".jsonl", ".parquet")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


class RowFile(NamedTuple):
    """One file of rows."""

    path: Path
    name: str  # part of its rows' uids: the file's own, and which of several that are called so it is
    entry: int  # which entry of the setting it belongs to, counted from 0


def find_files(entries: Sequence[DataEntry]) -> list[RowFile]:
    """Return the files of a data set in their order. Raises: SettingsError for what is not there, or there twice."""
    if not entries:
        raise SettingsError("settings: data.train is not set. Give a JSONL or Parquet file of prompts.")
    found: list[RowFile] = []
    seen: dict[Path, str] = {}
    names: Counter[str] = Counter()
    for number, entry in enumerate(entries):
        for path, name in _files_of(entry.path):
            if (first := seen.get(path.resolve())) is not None:
                raise SettingsError(f"data: {path} is named twice, by {first} and by {entry.path}. Leave one out.")
            seen[path.resolve()] = entry.path
            names[name] += 1
            found.append(RowFile(path, name if names[name] == 1 else f"{names[name]}/{name}", number))
    if len(found) > _MAX_FILES:
        raise SettingsError(f"data: {len(found)} files are named, at most {_MAX_FILES}. Join some of them.")
    return found


def _files_of(given: str) -> Iterator[tuple[Path, str]]:
    """Yield (path, name) of the files that a path, pattern, folder or name on the hub stands for."""
    if given.startswith(HUB_PREFIX):
        for path in fetch(given):
            yield path, f"{given}/{path.name}"
        return
    path = Path(given)
    if path.is_dir():
        inside = sorted(each for each in path.iterdir() if each.suffix.lower() in _SUFFIXES)
        if not inside:
            raise SettingsError(f"data: the folder {given} has no *.jsonl and no *.parquet. Name the files.")
    elif not path.exists() and glob.has_magic(given):
        inside = sorted(map(Path, glob.glob(given, recursive=True)))
        if not inside:
            raise SettingsError(f"data: no file is called like {given}. Change the pattern, or name the files.")
    else:
        inside = [path]
    for file in inside:
        _check(file)
        yield file, file.name


def _check(file: Path) -> None:
    if not file.is_file():
        raise SettingsError(f"data: {file} does not exist. Give a JSONL or Parquet file as data.train or data.eval.")
    if file.suffix.lower() in _PACKED:
        raise SettingsError(f"data: {file} is packed, and rows are read one by one in any order. Unpack it first.")
