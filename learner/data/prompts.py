"""Prompts from JSONL or Parquet files: rows of ours, of verl / Search-R1 and of OpenRLHF."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from protocol.errors import FrameError, SettingsError
from protocol.settings.data import DataSettings
from protocol.wire.codec import Limits
from protocol.wire.header_shape import MAX_VALUES, check_shape
from protocol.wire.messages import MAX_SAMPLES, Columns, Text, Turns

# A lease is one header of at most protocol.wire.codec.Limits.header_bytes; the rest is for its own fields.
MAX_ROW_BYTES = Limits().header_bytes - (1 << 16)
_MAX_ROW_VALUES = MAX_VALUES - 4 * MAX_SAMPLES
_row_decoder = msgspec.msgpack.Decoder(tuple[Text | Turns, Any, Columns])


@dataclass(frozen=True)
class Prompt:
    """One row of a data set."""

    uid: str  # hash of data set name, row index and content, so that merged sets never collide
    prompt: str | list[dict[str, Any]]  # text or chat messages
    label: Any  # whatever the reward services want
    columns: dict[str, Any]  # the row's other columns, unchanged


def load_prompts(path: str, data: DataSettings) -> list[Prompt]:
    """Return every prompt of a file, in file order.

    Raises: SettingsError for a missing file, a line that is not JSON, a row without prompt or label, an empty set; it
    names the file and the row's number, counted from 1.
    """
    if not path:
        raise SettingsError("settings: data.train is not set. Give a JSONL or Parquet file of prompts.")
    file = Path(path)
    if not file.is_file():
        raise SettingsError(f"data: {path} does not exist. Give a JSONL or Parquet file as data.train or data.eval.")
    rows = _parquet_rows(file) if file.suffix == ".parquet" else _jsonl_rows(file)
    prompts = [_prompt_of(row, file, number, data) for number, row in rows]
    if not prompts:
        raise SettingsError(f"data: {path} has no rows. A run needs at least one prompt.")
    return prompts


def _jsonl_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8").rstrip())
            except UnicodeDecodeError as error:
                raise SettingsError(f"data: {file} line {number} is not UTF-8: {error.reason}.") from None
            except json.JSONDecodeError as error:
                raise SettingsError(
                    f"data: {file} line {number} is not JSON: {error.msg} at column {error.colno}."
                ) from None
            if not isinstance(row, dict):
                raise SettingsError(f"data: {file} line {number} is a {type(row).__name__}, expected an object.")
            yield number, row


def _parquet_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise SettingsError(f"data: {file} is not a Parquet file: {error}") from None
    yield from enumerate(table.to_pylist(), start=1)


def _prompt_of(row: dict[str, Any], file: Path, number: int, data: DataSettings) -> Prompt:
    prompt = row.get(data.prompt_key)
    if not _is_prompt(prompt):
        raise SettingsError(
            f"data: {file} line {number} has {data.prompt_key} = {_cut(prompt)}, expected text or a list of chat "
            f"messages with role and content. Set data.prompt_key to one of {sorted(row)}, or fix the row."
        )
    label = row.get(data.label_key, _verl_label(row))
    if label is None and data.label_required:
        raise SettingsError(
            f"data: {file} line {number} has no label under {data.label_key!r}. Set data.label_key to one of "
            f"{sorted(row)}, or data.label_required to false when your reward needs none."
        )
    columns = {key: value for key, value in row.items() if key not in (data.prompt_key, data.label_key)}
    _check_sendable((prompt, label, columns), file, number)
    content = json.dumps([file.name, number, prompt, label], sort_keys=True, default=str)
    uid = hashlib.sha256(content.encode()).hexdigest()[:20]
    assert prompt is not None
    return Prompt(uid, prompt, label, columns)


def _check_sendable(content: object, file: Path, number: int) -> None:
    """Refuse a row that no lease can carry: found here it costs a sentence, found in the loop it costs the run."""
    try:
        encoded = msgspec.msgpack.encode(content)
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise SettingsError(f"data: {file} line {number} holds a value that cannot be sent: {error}.") from None
    if (size := len(encoded)) > MAX_ROW_BYTES:
        raise SettingsError(f"data: {file} line {number} has {size} bytes, at most {MAX_ROW_BYTES}. Shorten the row.")
    try:
        check_shape(encoded, _MAX_ROW_VALUES)
        _row_decoder.decode(encoded)
    except FrameError as error:
        raise SettingsError(f"data: {file} line {number} {error.problem}. Shorten the row.") from None
    except msgspec.ValidationError as error:
        raise SettingsError(f"data: {file} line {number} cannot be sent: {error}. Shorten the row.") from None


def _verl_label(row: dict[str, Any]) -> Any:
    reward_model = row.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in prompt)


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
