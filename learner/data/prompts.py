"""One row of a data set as a prompt: rows of ours, of verl / Search-R1 and of OpenRLHF."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from learner.data.prompt_rows import Row
from protocol.errors import FrameError, SettingsError
from protocol.settings.data import DataSettings
from protocol.wire.codec import Limits
from protocol.wire.header_shape import MAX_DEPTH, MAX_VALUES, check_shape
from protocol.wire.messages import MAX_SAMPLES, Columns, Text, Turns

# A lease is one header of at most protocol.wire.codec.Limits.header_bytes; the rest is for its own fields.
MAX_ROW_BYTES = Limits().header_bytes - (1 << 16)
_CONTAINERS = (dict, list, tuple)
_MAX_ROW_VALUES = MAX_VALUES - 4 * MAX_SAMPLES
_row_encoder = msgspec.msgpack.Encoder()
_row_decoder = msgspec.msgpack.Decoder(tuple[Text | Turns, Any, Columns])
# Uids are hashes of this text: another spelling of the same row would be another prompt to a run that goes on.
_uid_encoder = json.JSONEncoder(sort_keys=True, check_circular=False, default=str)


class UnsendableRowError(Exception):
    """No lease can carry this row. Its text is the problem, to stand behind the row's place."""


@dataclass(frozen=True)
class Prompt:
    """One row of a data set."""

    uid: str  # hash of data set name, row index and content, so that merged sets never collide
    prompt: str | list[dict[str, Any]]  # text or chat messages
    label: Any  # whatever the reward services want
    columns: dict[str, Any]  # the other columns, unchanged


def make_prompt(row: Row, file: str, name: str, data: DataSettings) -> Prompt:
    """Return a row as a prompt. file: its path, for errors. name: the file's name, a part of every uid.

    Raises: SettingsError for a row without prompt or label; UnsendableRowError.
    """
    content = row.content
    prompt = content.get(data.prompt_key)
    if not _is_prompt(prompt):
        raise SettingsError(
            f"data: {file} line {row.number} has {data.prompt_key} = {_cut(prompt)}, expected text or a list of chat "
            f"messages with role and content. Set data.prompt_key to one of {sorted(content)}, or fix the row."
        )
    label = content.get(data.label_key, _verl_label(content))
    if label is None and data.label_required:
        raise SettingsError(
            f"data: {file} line {row.number} has no label under {data.label_key!r}. Set data.label_key to one of "
            f"{sorted(content)}, or data.label_required to false when your reward needs none."
        )
    columns = {key: value for key, value in content.items() if key not in (data.prompt_key, data.label_key)}
    _check_sendable((prompt, label, columns))
    text = _uid_encoder.encode([name, row.number, prompt, label])
    assert prompt is not None
    return Prompt(hashlib.sha256(text.encode()).hexdigest()[:20], prompt, label, columns)


def _check_sendable(content: object) -> None:
    """Refuse a row that no lease can carry: found here it costs a sentence, found in the loop it costs the run."""
    try:
        encoded = _row_encoder.encode(content)
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise UnsendableRowError(f"holds a value that cannot be sent: {error}.") from None
    if (size := len(encoded)) > MAX_ROW_BYTES:
        raise UnsendableRowError(f"has {size} bytes, at most {MAX_ROW_BYTES}. Shorten the row.")
    try:
        # Each value has a byte of its own, so that a short row cannot hold too many; the walk over all is slow.
        if size > _MAX_ROW_VALUES or not _is_shallow(content, MAX_DEPTH):
            check_shape(encoded, _MAX_ROW_VALUES)
        _row_decoder.decode(encoded)
    except FrameError as error:
        raise UnsendableRowError(f"{error.problem}. Shorten the row.") from None
    except msgspec.ValidationError as error:
        raise UnsendableRowError(f"cannot be sent: {error}. Shorten the row.") from None


def _is_shallow(container: Any, depth: int) -> bool:
    """Return whether lists and maps nest at most `depth` deep, this one included."""
    if not depth:
        return False
    for inner in container.values() if type(container) is dict else container:
        if isinstance(inner, _CONTAINERS) and not _is_shallow(inner, depth - 1):
            return False
    return True


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
