"""The columns that verl and Search-R1 give a row of Parquet; `data_source` is what reward functions choose by."""

from dataclasses import dataclass
from typing import Any

from protocol.errors import SettingsError


@dataclass(frozen=True)
class Prepared:
    """What a data set's own row becomes."""

    question: str  # the user's message
    ground_truth: Any  # what the answer is compared with: text, or {"target": [texts]}
    extra: dict[str, Any]  # columns inside extra_info, beside split and index


def verl_row(prepared: Prepared, data_source: str, ability: str, split: str, index: int) -> dict[str, Any]:
    """Return the row. index: its place in its split, from 0."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prepared.question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": prepared.ground_truth},
        "extra_info": {"split": split, "index": index, **prepared.extra},
    }


def text_of(row: dict[str, Any], column: str) -> str:
    """Return a column's text. Raises: SettingsError, its text to stand behind the row's place."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise SettingsError(f"has {column} = {value!r:.80}, expected text. Its columns are {sorted(row)}.")
    return value
