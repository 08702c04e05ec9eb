"""Chat messages whose contents are texts: what chat templates of text models can write.

A template is not asked what it makes of a content that is a list of parts: some write it as Python would, others
nothing at all, and the policy would be trained on that.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class ContentError(ValueError):
    """A message has a content that is no text; str() says which and what is wrong."""


def with_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, each content one text: parts of text are joined, None of an assistant's is "".

    What is written in one way alone stays: a number, no content at all, and None beside calls of tools, which some
    templates write only then.
    Raises: ContentError. Example: [{"type": "text", "text": "Hi"}] becomes "Hi".
    """
    return [
        dict(message) if isinstance(message.get("content", ""), str | int | float) else _with_text(message, place)
        for place, message in enumerate(messages)
    ]


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
