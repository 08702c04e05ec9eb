"""Lines of a run's records, of the surviving steps: samples, held-out answers, and the learner's values of samples."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from learner.disk.run_folder import LEARNER_VALUES


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record of steps. After a resume the later lines count."""
    found: list[dict[str, Any]] = []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):  # cut off by a kill
            line = json.loads(text)
            if found and line["step"] < found[-1]["step"]:
                found = [each for each in found if each["step"] < line["step"]]
            found.append(line)
    return found


def read_samples(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the recorded samples of a run by group and place in it."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    unnumbered = dict[tuple[int, str], int]()
    for line in read_lines(folder / "samples.jsonl"):
        place = (line["step"], line["group"])
        unnumbered[place] = unnumbered.get(place, -1) + 1
        found[line["group"], line.get("sample_index", -1 - unnumbered[place])] = line
    return found


def values_of_step(run: Path, step: int) -> dict[tuple[str, int], dict[str, list[float]]]:
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for path in sorted((run / LEARNER_VALUES).glob(f"step_{step}.rank_*.json")):
        with suppress(ValueError):  # cut off by a kill
            found |= {(row["group"], row["sample_index"]): row for row in json.loads(path.read_bytes())}
    return found
