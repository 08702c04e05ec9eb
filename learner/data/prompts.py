"""One row of a data set as a prompt: rows of ours, of verl / Search-R1 and of OpenRLHF."""

from dataclasses import dataclass
from typing import Any

import msgspec

from learner.data.names import make_uid
from learner.data.prompt_rows import Row
from learner.data.prompt_shape import PromptShape, is_prompt
from protocol.errors import FrameError, SettingsError
from protocol.wire.codec import Limits
from protocol.wire.header_shape import MAX_DEPTH, MAX_VALUES, check_shape
from protocol.wire.messages import MAX_SAMPLES, Columns, Text, Turns

# A lease is one header of at most protocol.wire.codec.Limits.header_bytes; the rest is for its own fields.
MAX_ROW_BYTES = Limits().header_bytes - (1 << 16)
_CONTAINERS = (dict, list, tuple)
# Where rows for models of pictures keep them, and the mark in the prompt where one is to be seen.
_NOT_TEXT = {"images": "<image>", "videos": "<video>", "audios": "<audio>"}
_MAX_ROW_VALUES = MAX_VALUES - 4 * MAX_SAMPLES
_row_encoder = msgspec.msgpack.Encoder()
_row_decoder = msgspec.msgpack.Decoder(tuple[Text | Turns, Any, Columns])


class UnsendableRowError(Exception):
    """No lease can carry this row. Its text is the problem, to stand behind the row's place."""


@dataclass(frozen=True)
class Prompt:
    """One row of a data set."""

    uid: str  # hash of data set name, row index and content, so that merged sets never collide
    prompt: str | list[dict[str, Any]]  # text or chat messages
    label: Any  # whatever the reward services want
    columns: dict[str, Any]  # the other columns, unchanged


def make_prompt(row: Row, file: str, name: str, shape: PromptShape) -> Prompt:
    """Return a row as a prompt. file: its path, for errors. name: the file's name, a part of every uid.

    Raises: SettingsError for a row without prompt or label; UnsendableRowError.
    """
    content = row.content
    prompt = shape.apply(content, f"{file} line {row.number}")
    if not is_prompt(prompt):
        raise SettingsError(
            f"data: {file} line {row.number} has {shape.prompt_key} = {_cut(prompt)}, expected text or a list of chat "
            f"messages with role and content. Set data.prompt_key to one of {sorted(content)}, or fix the row."
        )
    _check_readable(prompt, content)
    label = content.get(shape.label_key, _verl_label(content))
    if label is None and shape.label_required:
        raise SettingsError(
            f"data: {file} line {row.number} has no label under {shape.label_key!r}. Set data.label_key to one of "
            f"{sorted(content)}, or data.label_required to false when your reward needs none."
        )
    columns = {key: value for key, value in content.items() if key not in (shape.prompt_key, shape.label_key)}
    # Three values in one list, of which the chat messages that a shape makes of text nest two deep.
    is_flat = row.max_depth is not None and row.max_depth + 3 <= MAX_DEPTH
    _check_sendable((prompt, label, columns), is_flat)
    return Prompt(make_uid(name, row.number, prompt, label), prompt, label, columns)


def _check_readable(prompt: str | list[dict[str, Any]], content: dict[str, Any]) -> None:
    """Refuse a row whose prompt shows what only its other columns hold: the policy would be asked about what it cannot
    see."""
    for column, mark in _NOT_TEXT.items():
        if content.get(column) and mark in (prompt if isinstance(prompt, str) else str(prompt)):
            problem = f"has {mark} in its prompt and {column} in a column, and a policy reads texts alone"
            raise UnsendableRowError(f"{problem}. Leave the row out.")


def _check_sendable(content: tuple[object, ...], is_flat: bool) -> None:
    """Refuse a row that no lease can carry: found here it costs a sentence, found in the loop it costs the run.

    is_flat: it is known already that nothing nests too deep.
    """
    try:
        encoded = _row_encoder.encode(content)
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise UnsendableRowError(f"holds a value that cannot be sent: {error}.") from None
    if (size := len(encoded)) > MAX_ROW_BYTES:
        raise UnsendableRowError(f"has {size} bytes, at most {MAX_ROW_BYTES}. Shorten the row.")
    try:
        # Each value has a byte of its own, so that a short row cannot hold too many; the walk over all is slow.
        if size > _MAX_ROW_VALUES or not (is_flat or _is_shallow(content)):
            check_shape(encoded, _MAX_ROW_VALUES)
        _row_decoder.decode(encoded)
    except FrameError as error:
        raise UnsendableRowError(f"{error.problem}. Shorten the row.") from None
    except msgspec.ValidationError as error:
        raise UnsendableRowError(f"cannot be sent: {error}. Shorten the row.") from None


def _is_shallow(content: tuple[object, ...]) -> bool:
    """Return whether lists and maps nest at most MAX_DEPTH deep, `content` included. Goes through them by depth."""
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for container in level
            for inner in (container.values() if type(container) is dict else container)
            if type(inner) in _CONTAINERS or isinstance(inner, _CONTAINERS)
        ]
        if not level:
            return True
    return False


def _verl_label(row: dict[str, Any]) -> Any:
    reward_model = row.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
