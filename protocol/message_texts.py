"""Input of chat templates of text models: messages with contents of one text each, and the template's variables.

Templates do not report a content that is a list of parts: some write its Python form, others nothing, and the policy
would be trained on that.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import SettingsError

_SET_BY_CODE = ("messages", "tools", "documents", "add_generation_prompt")  # variables that no setting may give


class ContentError(ValueError):
    """A message has a content that is not text; str() names the message and the problem."""


def with_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, each with one text as content: parts are joined, and an assistant's None becomes "".

    Numbers and missing contents stay, and so does None next to tool calls, which some templates require.
    Raises: ContentError. Example: [{"type": "text", "text": "Hi"}] becomes "Hi".
    """
    return [
        dict(message) if isinstance(message.get("content", ""), str | int | float) else _with_text(message, place)
        for place, message in enumerate(messages)
    ]


def check_template_kwargs(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
    """Raise SettingsError for a variable that the tokenizer's chat template does not read, or that Sluice sets itself.

    A tokenizer without a chat template is not checked.

    Example: {"enable_thinking": False} with a template of Qwen3.
    """
    template = getattr(tokenizer, "chat_template", None)
    texts = list(template.values()) if isinstance(template, Mapping) else [str(template)]
    for name in template_kwargs if template else ():
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
