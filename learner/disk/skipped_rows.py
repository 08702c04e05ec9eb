"""The rows of data.train that a run began without, and why, in its folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from learner.disk.layout import SKIPPED_ROWS
from protocol.disk.files import replace_file


class SkippedRow(NamedTuple):
    """One row that is left out."""

    file: str  # as the data set names it; "" of the only file of a run that older versions began
    number: int  # line or row in its file, counted from 1
    reason: str


def write_skipped(folder: Path, rows: Sequence[SkippedRow]) -> None:
    """Record these rows; a record of an earlier start that skipped rows goes. Raises: OSError."""
    if rows:
        replace_file(folder / SKIPPED_ROWS, json.dumps([list(row) for row in rows], indent=0).encode())
    else:
        (folder / SKIPPED_ROWS).unlink(missing_ok=True)


def read_skipped(folder: Path) -> list[SkippedRow]:
    """Return the rows that a run began without; none for a run that left none out."""
    try:
        rows = json.loads((folder / SKIPPED_ROWS).read_bytes())
    except FileNotFoundError:
        return []
    return [
        SkippedRow(str(row[0]), int(row[1]), str(row[2])) if len(row) > 2 else SkippedRow("", int(row[0]), str(row[1]))
        for row in rows
    ]
