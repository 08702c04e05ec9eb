"""The logs of a run's processes as one list, by time."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TAIL_BYTES = 512 * 1024  # of each file
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]\d{3})\s?(.*)")


def merged_logs(folder: Path, text: str = "", most: int = 500) -> list[dict[str, Any]]:
    """Return the newest entries with a text in them: time as it stands there, process and text, oldest first.

    A line without a time belongs to the entry before it.
    """
    paths = sorted(path for path in folder.rglob("*.log") if path.is_file()) if folder.is_dir() else []
    found = [entry for path in paths for entry in _read(path) if text.lower() in entry["text"].lower()]
    return sorted(found, key=lambda entry: str(entry["at"]))[-most:]


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return list(_entries(path))
    except OSError as error:
        return [{"at": "", "process": path.stem, "text": f"{path.name} cannot be read: {error.strerror}"}]


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        start = max(0, file.seek(0, 2) - _TAIL_BYTES)
        file.seek(start)
        lines = file.read().decode("utf-8", "replace").splitlines()[1 if start else 0 :]
    entry: dict[str, Any] | None = None
    for line in lines:
        if match := _STAMP.match(line):
            if entry is not None:
                yield entry
            at = match[1].replace("T", " ").replace(".", ",")
            entry = {"at": at, "process": path.stem, "text": match[2]}
        elif entry is not None:
            entry["text"] += f"\n{line}"
        else:
            entry = {"at": "", "process": path.stem, "text": line}
    if entry is not None:
        yield entry
