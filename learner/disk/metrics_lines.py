"""Reading metrics.jsonl: one JSON object per line, possibly while it is being written."""

import json
from pathlib import Path


class MetricsReader:
    """Follows metrics.jsonl while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def skip_known(self) -> None:
        """Take every line that stands there now as known."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def new_lines(self) -> list[dict[str, float]]:
        """Return the whole lines written since the last call; a line still being written is returned once it is whole.

        The file may not exist yet, or be a new, shorter one. A line that is no JSON object of numbers is left out.
        """
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [line for text in whole.splitlines() if (line := parse_metrics_line(text)) is not None]


def parse_metrics_line(text: bytes | str) -> dict[str, float] | None:
    """Return a metrics line's numbers, or None for what is no metrics line (cut off by a kill, or edited)."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    return {key: value for key, value in line.items() if isinstance(value, int | float)}
