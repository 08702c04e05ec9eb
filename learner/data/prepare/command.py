"""The command `sluice prepare-data NAME --from FILES --to FOLDER`: a set's own files -> rows that run."""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from learner.data.files import RowFile, find_files
from learner.data.prepare.sets import KNOWN_SETS, KnownSet, verl_row
from learner.data.prompt_rows import each_row
from protocol.disk.files import naming_disk_errors, replacing
from protocol.errors import OperatorError, SettingsError
from protocol.settings.data import DataEntry
from protocol.settings.paths import HUB_PREFIX

_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|dev)(?:[-_.]|$)")


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0, or 2 with one sentence."""
    parser = argparse.ArgumentParser(prog="sluice prepare-data", description=__doc__)
    known = "; ".join(f"{name}: {one.is_like}" for name, one in KNOWN_SETS.items())
    parser.add_argument(
        "name", choices=sorted(KNOWN_SETS), help=f"which data set, by the columns of its files ({known})"
    )
    parser.add_argument(
        "--from", dest="given", nargs="+", required=True, metavar="FILE",
        help="its JSONL or Parquet files, a pattern, a folder, or hf:OWNER/NAME[/CONFIG]:SPLIT",
    )  # fmt: skip
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="gets SPLIT.parquet of each split")
    parser.add_argument("--split", help="split of all these files; left out: train or test, as their names say")
    parser.add_argument("--data-source", help="data_source of each row; left out: the set's own name")
    options = parser.parse_args(arguments)
    try:
        written = prepare(options.name, options.given, options.to, options.split, options.data_source)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return 2
    scorer = KNOWN_SETS[options.name].scorer
    for path, num_rows in written.items():
        print(f"{path}: {num_rows:,} rows")
    by_split = {path.stem: path for path in written}
    held_out = next((by_split[split] for split in ("test", "validation", "valid", "dev") if split in by_split), None)
    use = [f"--data.train {by_split['train']}"] if "train" in by_split else []
    use += [f"--data.eval {held_out}"] if held_out is not None else []
    print(f"Use {' '.join(use) or 'the files'}; their labels are for the bundled scorer {scorer}.")
    return 0


def prepare(
    name: str, given: Sequence[str], folder: Path, split: str | None = None, data_source: str | None = None
) -> dict[Path, int]:
    """Write a Parquet file for each split, and return how many rows each has.

    Raises: SettingsError for files that are missing, repeated or have other rows, naming the row; OperatorError when
    the folder cannot be written. A file is written whole or not at all.
    """
    known = KNOWN_SETS[name]
    by_split: dict[str, list[RowFile]] = {}
    for file in find_files([DataEntry(path=one) for one in given]):
        by_split.setdefault(split or _split_of(given[file.entry], file), []).append(file)
    written: dict[Path, int] = {}
    with naming_disk_errors(f"{folder} cannot be written", "Give another folder as --to."):
        folder.mkdir(parents=True, exist_ok=True)
        for of_split, files in by_split.items():
            path = folder / f"{of_split}.parquet"
            written[path] = _write(path, files, known, of_split, data_source or known.data_source)
    return written


def _split_of(given: str, file: RowFile) -> str:
    """Return the split of a file, by its name or that of the folder it lies in."""
    if given.startswith(HUB_PREFIX):
        return given.rpartition(":")[2] if ":" in given.removeprefix(HUB_PREFIX) else "train"
    for name in (file.path.stem, file.path.parent.name):
        if found := _SPLIT.search(name):
            return found[1]
    raise SettingsError(f"data: which split {file.path} is of, its name does not say. Say it with --split.")


def _write(path: Path, files: Sequence[RowFile], known: KnownSet, split: str, data_source: str) -> int:
    rows = list(_prepared_rows(files, known, split, data_source))
    if not rows:
        raise SettingsError(f"data: {files[0].path} has no rows.")
    with replacing(path) as aside:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), aside)
    return len(rows)


def _prepared_rows(files: Sequence[RowFile], known: KnownSet, split: str, data_source: str) -> Iterator[dict[str, Any]]:
    index = 0
    for file in files:
        for row in each_row(file.path):
            try:
                made = verl_row(known.read(row.content), data_source, known.ability, split, index)
                json.dumps(made, ensure_ascii=False).encode()
            except SettingsError as error:
                raise SettingsError(f"data: {file.path} line {row.number} {error}") from None
            except UnicodeEncodeError as error:
                half = ascii(error.object[error.start])
                raise SettingsError(
                    f"data: {file.path} line {row.number} has {half}, half of a character. Remove it or write it whole."
                ) from None
            yield made
            index += 1
