"""Conversion of rows to prompts: rows of Sluice, verl, Search-R1 and OpenRLHF; uids of prompts, names of groups."""

import json
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import msgspec

from learner.data.prompt_rows import Row
from protocol.errors import SettingsError
from protocol.message_texts import ContentError, with_texts
from protocol.prompt_template import Part, parse_template
from protocol.settings.data import DataEntry, DataSettings
from protocol.wire.codec import Limits
from protocol.wire.messages import Columns, Text, Turns

UID_BYTES = 10
HASH_BYTES = 8  # of `Prompt.row_hash`
# A lease is one header of at most protocol.wire.codec.Limits.header_bytes; 64 KiB are reserved for its other fields.
MAX_ROW_BYTES = Limits().header_bytes - (1 << 16)
_CONTAINERS = (dict, list, tuple)
# Columns of multimodal rows, and the placeholder in the prompt.
_NOT_TEXT = {"images": "<image>", "videos": "<video>", "audios": "<audio>"}
_MAX_DEPTH = 32
_row_encoder = msgspec.msgpack.Encoder(order="deterministic")
_row_decoder = msgspec.msgpack.Decoder(tuple[Text | Turns, Any, Columns])
_encode = json.JSONEncoder(sort_keys=True, check_circular=False, default=str).encode
_PREFIX = {"train": "e", "eval": "eval-"}
_WRITTEN = re.compile(r"(?P<prefix>e|eval-)(?P<number>\d+)-(?P<uid>.+)", re.DOTALL)


class GroupName(NamedTuple):
    """Example: str(GroupName("train", 2, "c10f")) == "e2-c10f"; the evaluation of step 50 has "eval-50-c10f"."""

    kind: Literal["train", "eval"]  # use of the group; eval: a held-out prompt of an evaluation
    number: int  # train: epoch, from 0; eval: evaluated step
    uid: str

    def __str__(self) -> str:
        return f"{_PREFIX[self.kind]}{self.number}-{self.uid}"

    @classmethod
    def parse(cls, text: str) -> "GroupName | None":
        """Return the name that `text` is the string of; None for any other text."""
        found = _WRITTEN.fullmatch(text)
        if found is None:
            return None
        return cls("train" if found["prefix"] == "e" else "eval", int(found["number"]), found["uid"])


def make_uid(name: str, number: int, prompt: Any, label: Any) -> str:
    """Return the uid of a row: a hash of a JSON text of file name, line or row number (from 1), prompt and label.

    The JSON text must never change: resumed runs find their prompts by uid.
    """
    text = _encode([name, number, prompt, label])
    return sha256(text.encode()).hexdigest()[: 2 * UID_BYTES]


class UnsendableRowError(Exception):
    """No lease can carry this row. The message follows the row's place."""


@dataclass(frozen=True)
class Prompt:
    """One row of a data set."""

    uid: str  # hash of data set name, row index and content, so that merged sets never collide
    prompt: str | list[dict[str, Any]]  # text or chat messages
    label: Any  # input of the reward services
    columns: dict[str, Any]  # remaining columns, unchanged
    row_hash: bytes = bytes(HASH_BYTES)  # of prompt, label and columns; zeros where the uid covers the columns

    @property
    def label_text(self) -> str:
        """The label to read: itself, or as JSON."""
        return self.label if isinstance(self.label, str) else json.dumps(self.label, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class PromptShape:
    """The settings of an entry that turn its rows into prompts."""

    prompt_key: str
    label_key: str
    label_required: bool  # a row without one is refused
    template: tuple[Part, ...]  # the prompt's text; empty: the prompt's column as it is
    system_prompt: str | None  # first message of prompts that have none of this role
    is_whole_row: bool  # a demonstration: every column is kept, and the prompt is empty
    is_chat: bool | None  # True: text becomes a message; False: messages become text; None: as they are

    def apply(self, content: dict[str, Any], where: str) -> Any:
        """Return a row's prompt, or whatever stands in its place. where: names the row, for errors.

        Raises: SettingsError for a row without a column that the template names.
        """
        prompt = self._fill(content, where) if self.template else _with_contents(content.get(self.prompt_key))
        if (self.is_chat is None and self.system_prompt is None) or not is_prompt(prompt):
            return prompt
        if self.is_chat is False and isinstance(prompt, list):
            return "\n\n".join(str(message["content"] or "") for message in _with_texts(prompt, where))
        if isinstance(prompt, str) and (self.is_chat or self.system_prompt is not None):
            prompt = [{"role": "user", "content": prompt}]
        if self.system_prompt is None or not isinstance(prompt, list) or prompt[0]["role"] == "system":
            return prompt
        return [{"role": "system", "content": self.system_prompt}, *prompt]

    def _fill(self, content: dict[str, Any], where: str) -> str:
        return "".join(
            part.text + ("" if part.place is None else self._value(content, part.place, where))
            for part in self.template
        )

    def _value(self, content: dict[str, Any], place: tuple[str, ...], where: str) -> str:
        column, *inside = place
        value: Any = content
        for key in (column or self.prompt_key, *inside):
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                raise SettingsError(
                    f"data: {where} has no {key!r}, which the template names. Its columns are {sorted(content)}. "
                    "Change data.template, or fix the row."
                )
        # NaN is a missing number.
        if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
            raise SettingsError(
                f"data: {where} has {value!r:.80} where the template wants text or a number. Change data.template, or "
                "fix the row."
            )
        return str(value)


def shape_of(data: DataSettings, entry: DataEntry) -> PromptShape:
    """Return the shape of an entry's rows. Fields that the entry does not set come from the data section."""
    template = entry.template if entry.template is not None else data.template
    return PromptShape(
        prompt_key=entry.prompt_key or data.prompt_key,
        label_key=entry.label_key or data.label_key,
        label_required=data.label_required,
        template=tuple(parse_template(template)) if template is not None else (),
        system_prompt=data.system_prompt,
        is_chat=data.apply_chat_template,
        is_whole_row=data.form != "prompts",
    )


def _with_contents(prompt: Any) -> Any:
    """Return a prompt whose messages of calls alone have the content None: Parquet has no empty fields."""
    if not isinstance(prompt, list):
        return prompt
    return [{"content": None, **turn} if isinstance(turn, dict) and turn.get("tool_calls") else turn for turn in prompt]


def is_prompt(prompt: Any) -> bool:
    """Return whether this is text, or a list of chat messages with role and content."""
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(turn, dict) and "role" in turn and "content" in turn for turn in prompt)


def make_prompt(row: Row, file: str, name: str, shape: PromptShape) -> Prompt:
    """Return a row's prompt. file: path for errors. name: file's name, part of every uid.

    Raises: SettingsError for a row without prompt or label; UnsendableRowError.
    """
    content = row.content
    if shape.is_whole_row:
        uid = make_uid(name, row.number, content, None)
        return Prompt(uid, "", None, content, sha256(uid.encode()).digest()[:HASH_BYTES])
    prompt = shape.apply(content, f"{file} line {row.number}")
    if not is_prompt(prompt):
        raise SettingsError(
            f"data: {file} line {row.number} has {shape.prompt_key} = {_cut(prompt)}, expected text or a list of chat "
            f"messages with role and content. Set data.prompt_key to one of {sorted(content)}, or fix the row."
        )
    _check_readable(prompt, content)
    label = content.get(shape.label_key)
    label = _verl_label(content) if label is None else label
    if label is None and shape.label_required:
        raise SettingsError(
            f"data: {file} line {row.number} has no label under {shape.label_key!r}. Set data.label_key to one of "
            f"{sorted(content)}, or data.label_required to false when your reward needs none."
        )
    if not _is_finite(label):
        raise SettingsError(
            f"data: {file} line {row.number} has {shape.label_key} = {_cut(label)}, which JSON cannot send to a reward "
            "service. Fix the row."
        )
    columns = {key: value for key, value in content.items() if key not in (shape.prompt_key, shape.label_key)}
    # The tuple of three and the chat messages that a shape makes from text add at most three levels.
    is_flat = row.max_depth is not None and row.max_depth + 3 <= _MAX_DEPTH
    encoded = _check_sendable((prompt, label, columns), is_flat)
    row_hash = sha256(encoded).digest()[:HASH_BYTES]
    return Prompt(make_uid(name, row.number, prompt, label), prompt, label, columns, row_hash)


def _check_readable(prompt: str | list[dict[str, Any]], content: dict[str, Any]) -> None:
    """Refuse a row with an image, video or audio placeholder in its prompt: the policy reads text only."""
    for column, mark in _NOT_TEXT.items():
        if content.get(column) and mark in (prompt if isinstance(prompt, str) else str(prompt)):
            problem = f"has {mark} in its prompt and {column} in a column, and a policy reads text only"
            raise UnsendableRowError(f"{problem}. Leave the row out.")


def _check_sendable(content: tuple[object, ...], is_flat: bool) -> bytes:
    """Return the row as bytes; refuse one that no lease can carry. is_flat: the nesting is known to be in bounds."""
    try:
        encoded = _row_encoder.encode(content)
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise UnsendableRowError(f"holds a value that cannot be sent: {error}.") from None
    if (size := len(encoded)) > MAX_ROW_BYTES:
        raise UnsendableRowError(f"has {size} bytes, at most {MAX_ROW_BYTES}. Shorten the row.")
    if not (is_flat or _is_shallow(content)):
        raise UnsendableRowError(f"nests deeper than {_MAX_DEPTH}. Shorten the row.")
    try:
        _row_decoder.decode(encoded)
    except msgspec.ValidationError as error:
        raise UnsendableRowError(f"cannot be sent: {error}. Shorten the row.") from None
    return encoded


def _is_shallow(content: tuple[object, ...]) -> bool:
    """Return whether lists and maps nest at most _MAX_DEPTH deep, `content` included."""
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for container in level
            for inner in (container.values() if type(container) is dict else container)
            if type(inner) in _CONTAINERS or isinstance(inner, _CONTAINERS)
        ]
        if not level:
            return True
    return False


def _is_finite(label: Any) -> bool:
    """Return whether a label holds no NaN and no infinity."""
    if isinstance(label, str | int | None):
        return True
    try:
        json.dumps(label, allow_nan=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        return "JSON compliant" not in str(error)
    return True


def _verl_label(row: dict[str, Any]) -> Any:
    reward_model = row.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _with_texts(prompt: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    try:
        return with_texts(prompt)
    except ContentError as error:
        raise SettingsError(f"data: {where}: {error}. Fix the row.") from None
