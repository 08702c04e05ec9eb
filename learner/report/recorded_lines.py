"""Lines of a run's records, of the surviving steps: samples, held-out answers, and the learner's values of samples."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from learner.disk.run_folder import LEARNER_VALUES, SamplePlace

VALUES = ("logprobs", "advantages", "entropies")  # of a token, by the learner


class LearnerValues(msgspec.Struct):
    """What a rank knew of a recorded sample's tokens; each list has the model's tokens."""

    group: str
    sample_index: int
    logprobs: list[float]
    entropies: list[float]
    advantages: list[float]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record of steps. After a resume the later lines count."""
    found: list[dict[str, Any]] = []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):  # cut off by a kill
            line = json.loads(text)
            if found and _place(line).repeats(_place(found[-1])):
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


def values_of_step(run: Path, step: int) -> dict[tuple[str, int], LearnerValues]:
    """Return the values of a step's recorded samples by group and place in it."""
    found: dict[tuple[str, int], LearnerValues] = {}
    paths = (run / LEARNER_VALUES).glob(f"step_{step}.rank_*.json")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):  # a resume may leave those of earlier ranks
        with suppress(OSError, msgspec.DecodeError):  # it is being written, or a kill cut it off
            rows = msgspec.json.decode(path.read_bytes(), type=list[LearnerValues])
            found |= {(row.group, row.sample_index): row for row in rows}
    return found


def values_of_sample(run: Path, line: dict[str, Any]) -> dict[str, list[float]] | None:
    """Return the learner's logprobs, entropies and advantages of a sample's tokens, 0 where the mask is.

    line: of samples.jsonl. None: no rank recorded them, as in earlier versions and for samples without an update.
    """
    found = values_of_step(run, line["step"]).get((line["group"], line.get("sample_index", -1)))
    mask: Sequence[int] = line["loss_mask"]
    if found is None or len(found.logprobs) != sum(mask):
        return None
    return {name: _over_mask(getattr(found, name), mask) for name in VALUES}


def _place(line: dict[str, Any]) -> SamplePlace:
    return SamplePlace(line["step"], line.get("start", 0.0))


def _over_mask(values: Sequence[float], mask: Sequence[int]) -> list[float]:
    ordered = iter(values)
    return [next(ordered) if is_written else 0.0 for is_written in mask]
