"""The rows of data.train that a run began without, and why, in its folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from learner.disk.layout import SKIPPED_ROWS
from learner.disk.whole_file import replace_file


def write_skipped(folder: Path, rows: Sequence[tuple[int, str]]) -> None:
    """Record each row's number and reason; a record of an earlier start that skipped rows goes. Raises: OSError."""
    if rows:
        replace_file(folder / SKIPPED_ROWS, json.dumps([list(row) for row in rows], indent=0).encode())
    else:
        (folder / SKIPPED_ROWS).unlink(missing_ok=True)


def read_skipped(folder: Path) -> list[tuple[int, str]]:
    """Return the rows that a run began without; none for a run that left none out."""
    try:
        rows = json.loads((folder / SKIPPED_ROWS).read_bytes())
    except FileNotFoundError:
        return []
    return [(int(number), str(reason)) for number, reason in rows]
