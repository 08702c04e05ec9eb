"""Chat messages with contents of one text each, for chat templates of text models.

Templates do not report a content that is a list of parts: some write its Python form, others nothing, and the policy
would be trained on that.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class ContentError(ValueError):
    """A message has a content that is not text; str() names the message and the problem."""


def with_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with one text as content: parts are joined, and an assistant's None becomes "".

    Numbers and missing contents stay, and so does None next to tool calls, which some templates require.
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
