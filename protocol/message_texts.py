"""Input of chat templates of text models: messages with contents of one text each, and the template's variables.

Templates do not report a content that is a list of parts: some write its Python form, others nothing, and the policy
would be trained on that.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from protocol.errors import SettingsError

_SET_BY_CODE = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)  # variables that no setting may give


class ContentError(ValueError):
    """A message has a content that is not text; str() names the message and the problem."""


def with_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, each with one text as content: parts are joined, and an assistant's None becomes "".

    Arguments of calls that are JSON texts become objects: templates write them as JSON, and a text would get quotes.

    Numbers and missing contents stay, and so does None next to tool calls, which some templates require.
    Raises: ContentError. Example: [{"type": "text", "text": "Hi"}] becomes "Hi".
    """
    with_contents = [
        dict(message) if isinstance(message.get("content", ""), str | int | float) else _with_text(message, place)
        for place, message in enumerate(messages)
    ]
    return [with_objects(message) for message in with_contents]


def with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with JSON texts of its calls' arguments as objects; other texts stay."""
    return _with_arguments(message, _as_object)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    """Return what `apply_chat_template` makes of the messages. Raises: what the template raises.

    Arguments of calls are objects, or texts for a template that joins texts.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except TypeError:  # DeepSeek's template joins texts
        texts = [_with_arguments(message, _as_text) for message in messages]
        if texts == list(messages):
            raise
        return tokenizer.apply_chat_template(texts, **options)


def render_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return the text of a prompt: the messages and the start of an answer, or the assistant's last one unfinished.

    Raises: what the template raises.
    """
    last = messages[-1] if messages else {}
    begun = last.get("content") if last.get("role") == "assistant" and not last.get("tool_calls") else None
    asked = messages[:-1] if begun else messages
    text = render_chat(tokenizer, asked, tokenize=False, add_generation_prompt=True, **options)
    return f"{text}{begun or ''}"


def strings_of(value: Any) -> Iterator[str]:
    """Yield every text inside messages, keys included: a call's arguments have names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from strings_of(key)
            yield from strings_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from strings_of(part)


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return messages with `change` applied to every text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {with_strings(key, change): with_strings(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_strings(part, change) for part in value]
    return value


def _with_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the message with the changed arguments of its calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        return dict(message)
    return {**message, "tool_calls": [_with_changed(call, change) for call in calls]}


def _with_changed(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _with_changed(function, change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else dict(call)


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def check_template_kwargs(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
    """Raise SettingsError for a variable that the tokenizer's chat template does not read, or that Sluice sets itself.

    Example: {"enable_thinking": False} with a template of Qwen3.
    """
    template = getattr(tokenizer, "chat_template", None)
    texts = list(template.values()) if isinstance(template, Mapping) else [str(template)]
    for name in template_kwargs:
        if not template:
            raise SettingsError(
                f"settings: rollout.chat_template_kwargs has {name}, and policy.model has no chat template. Remove it."
            )
        if name in _SET_BY_CODE or not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts):
            raise SettingsError(
                f"settings: rollout.chat_template_kwargs has {name}, which is not a variable of this model's chat "
                "template, or one that Sluice sets itself. Remove it."
            )


def _with_text(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    content = message["content"]
    if content is None and message.get("tool_calls"):
        return dict(message)
    if content is None and message.get("role") == "assistant":
        return {**message, "content": ""}
    if not isinstance(content, list | tuple):
        raise ContentError(f"message {place + 1} has the content {content!r:.80}, expected text or parts of text")
    return {**message, "content": "".join(_text(part, place) for part in content)}


def _text(part: Any, place: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise ContentError(f"message {place + 1} has the part {part!r:.80}: only texts can be read here")
    return text
