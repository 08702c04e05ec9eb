"""Chat messages as agents send them: for the model's template, and for the comparison with earlier requests."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.endpoint.requests import Refusal

_ROLES = {"developer": "system", "function": "tool"}
_KNOWN_ROLES = ("system", "user", "assistant", "tool")
_CALL_ID = re.compile(r"call[a-z][0-9a-z]{2}\d\d")  # ids of `call_id`: all but the last two letters are the turn's


@dataclass(frozen=True)
class Message:
    """One chat message in one form.

    A client returns our turns in its library's form: with nulls, other white space, other spelling of the arguments.
    Such a turn is still ours.
    """

    rendered: dict[str, Any]  # message for the chat template
    same_as: tuple[Any, ...]  # equal for messages with the same meaning

    @property
    def wording(self) -> tuple[str, list[str]]:
        """Its text, without white space around it, and the ids of its calls."""
        return self.rendered["content"].strip(), [call["id"] for call in self.rendered.get("tool_calls", ())]


def read_messages(messages: Sequence[Mapping[str, Any]], field: str = "messages") -> list[Message]:
    """Return an agent's messages, as `in_turns`. Raises: Refusal naming the first that a text model cannot read.

    field: the request's.
    """
    return in_turns(_read_message(message, f"{field}[{place}]") for place, message in enumerate(messages))


def in_turns(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with a turn's calls in one message, and their results behind it in the order of the calls.

    camel-ai sends each call with its result. Others send the results in the order in which their tools end.
    """
    together: list[Message] = []
    results: list[Message] = []  # behind the last message of `together`
    for message in messages:
        if message.rendered["role"] == "tool":
            results.append(message)
        elif together and (turn := _join_calls(together[-1], message)) is not None:
            together[-1] = turn
        else:
            together += [*_in_order(results, together[-1:]), message]
            results = []
    return [*together, *_in_order(results, together[-1:])]


def read_content(content: Any, path: str) -> str:
    """Return a content, a text or a list of parts, as one text. Parts become lines, as in vLLM's server.

    Raises: Refusal for a part without a text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(400, f"{path} is neither text nor a list of parts", path)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refusal(400, f"{path} has a part of the type {kind!r:.40}: only texts can be read here", path)
        texts.append(text)
    return "\n".join(texts)


def thought_of(text: str) -> str:
    """Return a thought that a client keeps apart as the beginning of its turn."""
    return f"<think>\n{text}\n</think>\n\n" if text else ""


def own_turn(content: str, calls: Sequence[tuple[str, Any]]) -> tuple[Any, ...]:
    """Return the `same_as` of the policy's own turn. calls: (name of the tool, arguments)."""
    # Some templates write the opening tag of a thought in front of the turn.
    text = "".join(content.split()).removeprefix("<think>")
    return ("assistant", text, tuple((name, _comparable(arguments)) for name, arguments in calls))


def _read_message(message: Mapping[str, Any], path: str) -> Message:
    role = message.get("role")
    role = _ROLES.get(str(role), role)
    if role not in _KNOWN_ROLES:
        raise Refusal(400, f"{path}.role is {role!r:.80}, expected one of {', '.join(_KNOWN_ROLES)}", f"{path}.role")
    content = read_content(message.get("content"), f"{path}.content")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and thought and "</think>" not in content:
        content = thought_of(read_content(thought, f"{path}.reasoning_content")) + content
    rendered: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if isinstance(value := message.get(name), str):
            rendered[name] = value
    if message.get("role") == "tool" and "tool_call_id" not in rendered:
        raise Refusal(400, f"{path} is the result of a tool without tool_call_id, the id of its call", path)
    if role != "assistant":
        return Message(rendered, (role, content, rendered.get("name")))
    # OpenAI's older form of one call.
    older = [{"function": message["function_call"]}] if message.get("function_call") else []
    calls = [_read_call(call, f"{path}.tool_calls") for call in message.get("tool_calls") or older]
    return _turn({**rendered, "tool_calls": calls} if calls else rendered)


def _turn(rendered: dict[str, Any]) -> Message:
    functions = [call["function"] for call in rendered.get("tool_calls", ())]
    calls = [(each["name"], each["arguments"]) for each in functions]
    return Message(rendered, own_turn(rendered["content"], calls))


def _join_calls(turn: Message, message: Message) -> Message | None:
    """Return a turn with further calls of it, which have a message of their own; None: the message is no part of it."""
    ids, more = turn.wording[1], message.wording[1]
    if not ids or not more or message.rendered["content"] or not all(map(_CALL_ID.fullmatch, [*ids, *more])):
        return None
    if len({name[:-2] for name in [*ids, *more]}) > 1:
        return None
    calls = [*turn.rendered["tool_calls"], *message.rendered["tool_calls"]]
    return _turn({**turn.rendered, "tool_calls": sorted(calls, key=lambda call: str(call["id"]))})


def _in_order(results: Sequence[Message], turn: Sequence[Message]) -> list[Message]:
    """Return results in the order of the turn's calls; others follow. turn: the message before them, if any."""
    places = {name: place for message in turn for place, name in enumerate(message.wording[1])}
    return sorted(results, key=lambda result: places.get(result.rendered.get("tool_call_id", ""), len(places)))


def _read_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refusal(400, f"{path} holds a call that is not {{id, type, function: {{name, arguments}}}}", path)
    # Templates encode arguments as JSON themselves. A text would get quotes.
    arguments = _parse(function.get("arguments"))
    function = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


def _parse(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _comparable(arguments: Any) -> str:
    """Return a text that is equal for equal arguments in any spelling."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> float:
    """Return a number; 2.0 as 2, which JavaScript writes in its place."""
    number = float(text)
    return int(number) if number.is_integer() else number
