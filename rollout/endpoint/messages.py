"""An agent's chat messages in one form: what the model's template renders, and what two messages are compared by.

A client sends our own turns back as its library writes them: with nulls, with arguments written anew, without the
spaces at the ends. Such a turn is still ours.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.endpoint.refusals import Refused

_ROLES = {"developer": "system", "function": "tool"}
_KNOWN = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Message:
    """One message."""

    rendered: dict[str, Any]  # as chat templates take it
    same_as: tuple[Any, ...]  # equal for messages that say the same


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return an agent's messages. Raises: Refused naming the first that no text model can read."""
    return [_read(message, f"messages[{place}]") for place, message in enumerate(messages)]


def own_turn(content: str, calls: Sequence[tuple[str, str]]) -> tuple[Any, ...]:
    """Return what the policy's own turn is compared by. calls: (name of the tool, arguments as JSON)."""
    return ("assistant", content.strip(), tuple((name, _compared(arguments)) for name, arguments in calls))


def _read(message: Mapping[str, Any], path: str) -> Message:
    role = message.get("role")
    role = _ROLES.get(str(role), role)
    if role not in _KNOWN:
        raise Refused(400, f"{path}.role is {role!r:.80}, expected one of {', '.join(_KNOWN)}", f"{path}.role")
    content = _content(message.get("content"), f"{path}.content")
    rendered: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if isinstance(value := message.get(name), str):
            rendered[name] = value
    if role != "assistant":
        return Message(rendered, (role, content, rendered.get("name")))
    # OpenAI's older form of one call.
    older = [{"function": message["function_call"]}] if message.get("function_call") else []
    calls = [_call(call, f"{path}.tool_calls") for call in message.get("tool_calls") or older]
    if calls:
        rendered["tool_calls"] = calls
    return Message(
        rendered, own_turn(content, [(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    )


def _content(content: Any, path: str) -> str:
    """Return a message's text: one text, parts of text, or none."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(400, f"{path} is neither text nor a list of parts", path)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refused(400, f"{path} has a part of the type {kind!r:.40}: only texts can be read here", path)
        texts.append(text)
    return "".join(texts)


def _call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(400, f"{path} holds a call that is not {{id, type, function: {{name, arguments}}}}", path)
    # Templates write arguments as JSON themselves: given a text, they would write it in quotes.
    arguments = _parsed(function.get("arguments"))
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _compared(arguments: Any) -> str:
    """Return arguments as a text that is the same for equal ones, however they were written."""
    parsed = _parsed(arguments)
    return parsed if isinstance(parsed, str) else json.dumps(parsed, sort_keys=True)
