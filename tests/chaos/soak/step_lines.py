"""What a run's metrics.jsonl says of its steps: how fast it trained, when it stood still, how well it scored.

A line is a step that was trained. A run that goes back to a checkpoint takes the lines since out of the file and trains
those steps again, so that what is read at the end is the surviving lineage.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

Line = dict[str, float]


def read_lines(path: Path) -> list[Line]:
    """Return one line a step, in their order; none where there is no file yet."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["step"] > 0 and "at_s" in line]


def within(lines: Sequence[Line], since_s: float, until_s: float) -> list[Line]:
    """Return the lines of that time, in seconds since 1970."""
    return [line for line in lines if since_s <= line["at_s"] <= until_s]


def steps_per_s(lines: Sequence[Line], since_s: float, until_s: float) -> float:
    """Return how many steps of the lineage a second of that time gave."""
    return len({line["step"] for line in within(lines, since_s, until_s)}) / (until_s - since_s)


def standstills(lines: Sequence[Line], longer_than_s: float) -> list[tuple[float, float]]:
    """Return when each began, in seconds since 1970, and how many seconds no step was trained then."""
    times = sorted(line["at_s"] for line in lines)
    gaps = ((earlier, later - earlier) for earlier, later in itertools.pairwise(times))
    return [(began, seconds) for began, seconds in gaps if seconds > longer_than_s]


def score(lines: Sequence[Line]) -> float | None:
    """Return the newest held-out score; None where there is none."""
    return next((line["eval/held_out/reward"] for line in reversed(lines) if "eval/held_out/reward" in line), None)


def is_whole(lines: Sequence[Line]) -> bool:
    """Return whether no step from the first one on is missing."""
    steps = sorted({int(line["step"]) for line in lines})
    return steps == list(range(1, len(steps) + 1))
