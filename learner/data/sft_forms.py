"""The forms of demonstrations, recognised by their columns: read and checked without a tokenizer.

columns                                          learnt
segments [{text, weight}]                        as weighted; 0: not
messages, conversations                          assistant messages; `weight`, `loss_scale`, `loss`, `train` count
instruction, output [input, system, history]     the output, and the answers of the history
prompt and completion or response, input and output    the answer and its end token
input_ids [labels, completion_mask, loss_mask]   tokens of a label other than -100, or of a mask; else all
text                                             all of it and its end token: continued pretraining
"""

import json
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from learner.data.prompt_rows import each_row
from protocol.errors import SettingsError
from protocol.message_texts import with_objects

Messages = list[dict[str, Any]]

_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_OWN_ROLES = ("system", "user", "assistant", "tool")
_MAX_WEIGHT = 1e9
_MAX_TOKEN = 2**31 - 1
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
_UNREAD = (
    *("prompt_mask", "response_mask", "weights", "weight", "loss_weights", "position_ids", "seq_lengths"),
    "chat_template_kwargs",
)
_LOSS = "Give loss: true or false, or weight: a number"
_UNREAD_IN_MESSAGES = {
    **dict.fromkeys(("trainable", "loss_mask", "loss_weight", "mask", "masked"), _LOSS),
    "function_call": "Make it tool_calls",
}
_PARTS = {
    "system": "Make it a message of the role system",
    "system_prompt": "Make it a message of the role system",
    "history": "Make it messages",
    "query": "Make it a part of the prompt, or remove it",
    "prompt": "Make it a part of the input, or remove it",
    "functions": "Name it tools, with a schema each",
}
"""Columns with a part of a conversation, and what to do where the form does not read them."""
_PREFERENCES = ("chosen", "rejected", "rejected_response", "rejected_messages", "kto_tag")


class BadRowError(Exception):
    """The row cannot be learnt; its text is a sentence without file and row."""


class Segments(NamedTuple):
    """Texts with a loss weight each."""

    parts: list[tuple[str, float]]


class Chat(NamedTuple):
    """A conversation with a loss weight for each message."""

    messages: Messages
    weights: list[float]
    tools: list[Any] | None


class Completion(NamedTuple):
    """A prompt and the answer to learn."""

    prompt: str | Messages
    response: str
    tools: list[Any] | None


class Tokens(NamedTuple):
    """Token ids with a loss weight each."""

    ids: list[int]
    weights: list[float]


Content = Segments | Chat | Completion | Tokens


class Demonstration(NamedTuple):
    """One row of a file."""

    number: int  # line or row, from 1
    form: str  # its columns, in words
    content: Content


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Return the rows of a JSONL or Parquet file in order.

    Raises: SettingsError with file and row for an unusable one, and for a file that is empty or cannot be read.
    """
    found = []
    for row in each_row(path):
        try:
            found.append(Demonstration(row.number, *recognise(row.content)))
        except BadRowError as error:
            raise SettingsError(f"data: {path} line {row.number}: {error}.") from None
    if not found:
        raise SettingsError(f"data: {path} has no rows. Give a JSONL or Parquet file of demonstrations.")
    return found


def describe_forms(counts: Counter[str]) -> str:
    """Return the number of rows of each form, such as `800 rows of prompt + response`."""
    return ", ".join(f"{count:,} {'row' if count == 1 else 'rows'} of {form}" for form, count in counts.items())


def recognise(row: dict[str, Any]) -> tuple[str, Content]:
    """Return a row's form, in words, and its content. Raises: BadRowError."""
    row = {key: each for key, each in row.items() if each is not None}  # Parquet has every column in every row
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise BadRowError(f"has {error.object[error.start]!a}, half of a character") from None
    if is_preference := [key for key in _PREFERENCES if key in row]:
        raise BadRowError(f"has the column {is_preference[0]!r}: it compares answers, and fine-tuning learns every one")
    for columns, read, others in _FORMS:
        if all(column in row for column in columns):
            if row.get("label") in (True, False, "true", "false", "True", "False"):
                raise BadRowError("has a label that is true or false: fine-tuning would learn the bad answers too")
            refuse_unread(row, others)
            return " + ".join(columns), read(row)
    expected = ", ".join(" + ".join(columns) for columns, *_ in _FORMS)
    raise BadRowError(f"has the keys {sorted(row)}, expected one of these: {expected}")


def refuse_unread(row: dict[str, Any], read: Collection[str]) -> None:
    """Raise BadRowError for a column that changes what is learnt and that the row's form does not read.

    read: those of `_PARTS` that it reads, or that repeat a part of it.
    """
    if parts := [key for key in _PARTS if row.get(key) and key not in read]:
        raise BadRowError(f"has the column {parts[0]}, which this form does not read. {_PARTS[parts[0]]}")
    if unread := [key for key in _UNREAD if row.get(key) is not None]:
        raise BadRowError(f"has the column {unread[0]}, which is not read and would change what is learnt. Remove it")
    if unread := [key for key in ("images", "image", "videos", "audios") if row.get(key)]:
        raise BadRowError(f"has the column {unread[0]}, and only text can be learnt")


def _segments(row: dict[str, Any]) -> Segments:
    given = row["segments"]
    if not isinstance(given, list):
        raise BadRowError("segments is not a list")
    parts = []
    for i, segment in enumerate(given):
        text, weight = (segment.get("text"), segment.get("weight")) if isinstance(segment, dict) else (None, None)
        if not isinstance(text, str):
            raise BadRowError(f"segments[{i}].text is {text!r}, expected a string")
        parts.append((text, _checked_weight(weight, f"segments[{i}].weight")))
    return Segments(parts)


def _chat(row: dict[str, Any]) -> Chat:
    return _learn_answers(_checked_messages(row["messages"], "messages"), _tools(row))


def _share_gpt(row: dict[str, Any]) -> Chat:
    given = row["conversations"]
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise BadRowError(f"conversations is {given!r}, expected a list of messages")
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for i, each in enumerate(given):
        name = each.get("from", each.get("role"))
        role = _ROLES.get(str(name), name)
        if role not in _OWN_ROLES:
            expected = ", ".join([*_ROLES, *_OWN_ROLES])
            raise BadRowError(f"conversations[{i}].from is {name!r}, expected one of {expected}")
        others = {key: value for key, value in each.items() if key not in ("from", "role", "value", "content")}
        said = {"content": each.get("value", each.get("content"))}
        messages.append({"role": role, **(_called(said["content"]) if name == "function_call" else said), **others})
    return _learn_answers(_checked_messages(messages, "conversations"), _tools(row))


def _called(text: Any) -> dict[str, Any]:
    """Return a call that is JSON with name and arguments as the chat templates know it."""
    try:
        call = json.loads(text)
    except (TypeError, ValueError):
        call = None
    if not isinstance(call, dict) or "name" not in call:
        raise BadRowError(f"has the function_call {str(text)[:80]!r}, expected JSON with name and arguments")
    return {"content": "", "tool_calls": [{"type": "function", "function": call}]}


def _alpaca(row: dict[str, Any]) -> Chat:
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(each, list) and len(each) == 2 for each in history):
        raise BadRowError(f"history is {history!r}, expected a list of [question, answer]")
    question = row["instruction"]
    if more := row.get("input"):
        if not isinstance(more, str):
            raise BadRowError(f"input is {more!r}, expected a string")
        question = f"{question}\n{more}" if isinstance(question, str) else question
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for asked, answered in [*history, (question, row["output"])]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return _learn_answers(_checked_messages(messages, "instruction + output"), _tools(row))


def _answer_of(prompt_key: str, answer_key: str) -> Callable[[dict[str, Any]], Content]:
    def read(row: dict[str, Any]) -> Content:
        prompt, answer = row[prompt_key], row[answer_key]
        if not isinstance(prompt, str):
            prompt = _checked_messages(prompt, prompt_key)
            if prompt and prompt[-1]["role"] == "assistant":
                raise BadRowError(f"{prompt_key} ends with the assistant's message. Give the conversation as messages")
        if isinstance(prompt, str) and row.get("tools"):
            raise BadRowError(
                f"has tools, which a text in {prompt_key} cannot name. Make the prompt a list of messages"
            )
        if isinstance(answer, str):
            return Completion(prompt, answer, _tools(row))
        if not isinstance(answer, list) or isinstance(prompt, str):
            expected = "a string" if isinstance(prompt, str) else "a string or a list of messages"
            raise BadRowError(f"{answer_key} is {answer!r}, expected {expected}")
        learnt = _learn_answers(_checked_messages(answer, answer_key), _tools(row))
        return Chat(prompt + learnt.messages, [0.0] * len(prompt) + learnt.weights, learnt.tools)

    return read


def _tokens(row: dict[str, Any]) -> Tokens:
    ids = _integers(row, "input_ids", None)
    if beyond := [each for each in ids if not 0 <= each <= _MAX_TOKEN]:
        raise BadRowError(f"has the token {beyond[0]}, expected numbers of tokens")
    kept = _integers(row, "attention_mask", len(ids)) if "attention_mask" in row else [1] * len(ids)
    weights = [1.0] * len(ids)
    if "labels" in row:
        labels = _integers(row, "labels", len(ids))
        if wrong := [i for i, label in enumerate(labels) if label not in (-100, ids[i])]:
            raise BadRowError(f"labels[{wrong[0]}] is {labels[wrong[0]]}, expected -100 or input_ids[{wrong[0]}]")
        weights = [float(label != -100) for label in labels]
    for key in _MASKS:
        if key in row:
            weights = [one * float(each != 0) for one, each in zip(weights, _integers(row, key, len(ids)), strict=True)]
    chosen = [i for i, each in enumerate(kept) if each]
    return Tokens([ids[i] for i in chosen], [weights[i] for i in chosen])


def _text(row: dict[str, Any]) -> Completion:
    if not isinstance(row["text"], str):
        raise BadRowError(f"text is {row['text']!r}, expected a string")
    return Completion("", row["text"], None)


# A row of whole texts, tokens or messages may keep the columns that it was made from.
_MADE_FROM = ("history", "query", "prompt")
# Columns, what reads them, and the other parts of a conversation that the form reads or repeats.
_FORMS: tuple[tuple[tuple[str, ...], Callable[[dict[str, Any]], Content], tuple[str, ...]], ...] = (
    (("segments",), _segments, (*_MADE_FROM, "functions")),
    (("messages",), _chat, _MADE_FROM),
    (("conversations",), _share_gpt, ("system", *_MADE_FROM)),
    (("instruction", "output"), _alpaca, ("system", "history", "prompt")),
    (("prompt", "completion"), _answer_of("prompt", "completion"), ("prompt",)),
    (("prompt", "response"), _answer_of("prompt", "response"), ("prompt",)),
    (("input", "output"), _answer_of("input", "output"), ()),
    (("input_ids",), _tokens, (*_MADE_FROM, "functions")),
    (("text",), _text, (*_MADE_FROM, "functions")),
)


def _learn_answers(messages: Messages, tools: list[Any] | None) -> Chat:
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRowError("has no message of the role assistant: there is nothing to learn from it")
    return Chat(messages, [_message_weight(i, message) for i, message in enumerate(messages)], tools)


def _message_weight(i: int, message: dict[str, Any]) -> float:
    given = {key: message[key] for key in ("loss", "train", "training") if key in message}
    if wrong := [key for key, is_learnt in given.items() if is_learnt not in (True, False)]:
        raise BadRowError(f"messages[{i}].{wrong[0]} is {message[wrong[0]]!r}, expected true or false")
    if message["role"] != "assistant" or not all(given.values()):
        return 0.0
    key = "loss_scale" if "loss_scale" in message else "weight"
    return _checked_weight(message.get(key, 1.0), f"messages[{i}].{key}")


def _checked_weight(weight: Any, name: str) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= _MAX_WEIGHT:
        raise BadRowError(f"{name} is {weight!r}, expected a number of at least 0")
    return float(weight)


def _checked_messages(messages: Any, key: str) -> Messages:
    """Return the messages without their empty fields, which Parquet adds."""
    if not isinstance(messages, list):
        raise BadRowError(f"{key} is {messages!r}, expected a list of messages")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRowError(f"{key}[{i}] has no role")
        if (role := message["role"]) not in _OWN_ROLES and role.lower() in (*_ROLES, "assistant", "model", "bot"):
            raise BadRowError(f"{key}[{i}].role is {role!r}, expected one of {', '.join(_OWN_ROLES)}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise BadRowError(f"{key}[{i}].content is {message.get('content')!r}, expected a string")
        if unread := [name for name in _UNREAD_IN_MESSAGES if message.get(name) is not None]:
            raise BadRowError(f"{key}[{i}] has {unread[0]}, which is not read. {_UNREAD_IN_MESSAGES[unread[0]]}")
        checked.append(with_objects({name: each for name, each in message.items() if each is not None}))
        if calls := checked[-1].get("tool_calls"):
            _check_calls(calls, f"{key}[{i}].tool_calls")
    return checked


def _check_calls(calls: Any, name: str) -> None:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRowError(f"{name} is {str(calls)[:80]}, expected a list of calls")
    for call in calls:
        function = call.get("function")
        if isinstance(text := (function if isinstance(function, dict) else call).get("arguments"), str):
            raise BadRowError(f"{name} has the arguments {text[:80]!r}, which are not JSON")


def _tools(row: dict[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRowError(f"tools is a string but not JSON ({error})") from None
    if tools and not isinstance(tools, list):
        raise BadRowError(f"tools is {tools!r}, expected a list of JSON schemas")
    return tools or None


def _integers(row: dict[str, Any], key: str, length: int | None) -> list[int]:
    given = row[key]
    if not isinstance(given, list) or not all(isinstance(each, int) for each in given):
        raise BadRowError(f"{key} is {str(given)[:80]}, expected a list of integers")
    if length is not None and len(given) != length:
        raise BadRowError(f"{key} has {len(given)} numbers, and input_ids has {length}")
    return given
