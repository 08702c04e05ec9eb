"""What the learner knew of each token of a recorded sample, from the files of the ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from learner.disk.run_folder import LEARNER_VALUES


class _Row(msgspec.Struct):
    group: str
    sample_index: int
    logprobs: list[float]  # of the model's tokens, as are the others
    entropies: list[float]
    advantages: list[float]


def read_learner_values(run: Path, line: dict[str, Any]) -> dict[str, list[float]] | None:
    """Return the learner's logprobs, entropies and advantages of a sample's tokens, 0 where the mask is.

    line: of samples.jsonl. None: no rank recorded them, as in earlier versions and for samples without an update.
    """
    found: _Row | None = None
    paths = (run / LEARNER_VALUES).glob(f"step_{line['step']}.rank_*.json")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):  # a resume may leave those of earlier ranks
        with_it = [row for row in _rows(path) if (row.group, row.sample_index) == (line["group"], line["sample_index"])]
        found = with_it[0] if with_it else found
    mask: Sequence[int] = line["loss_mask"]
    if found is None or len(found.logprobs) != sum(mask):
        return None
    columns = {"logprobs": found.logprobs, "entropies": found.entropies, "advantages": found.advantages}
    return {name: _over_mask(values, mask) for name, values in columns.items()}


def _rows(path: Path) -> list[_Row]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Row])
    except (OSError, msgspec.DecodeError):  # it is being written, or a kill cut it off
        return []


def _over_mask(values: Sequence[float], mask: Sequence[int]) -> list[float]:
    ordered = iter(values)
    return [next(ordered) if is_written else 0.0 for is_written in mask]
