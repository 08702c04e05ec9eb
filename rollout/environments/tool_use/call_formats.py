"""How families of models write a call of a tool, and which of them a chat template belongs to.

    hermes       <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>, also of Qwen 2.5 and 3
    qwen3_coder  <tool_call><function=f><parameter=x>1</parameter></function></tool_call>, also of Qwen 3.5
    llama3       {"name": "f", "parameters": {"x": 1}} and nothing else; several with ; between them
    mistral      [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}], or [TOOL_CALLS]f[ARGS]{"x": 1} of newer ones

What a model thinks, up to the last </think>, calls nothing.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_THOUGHT_END = "</think>"
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL_CALL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN = re.compile(r"[\s;,]*")
_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    """One call as the policy wrote it."""

    name: str  # of the tool; empty: none could be read
    arguments: Mapping[str, Any]  # by name
    problem: str | None = None  # why it cannot be read; None: it can


CallFormat = Callable[[str], list[Call]]
"""Returns the calls in a turn, in order; none where it is an answer."""


def hermes_calls(text: str) -> list[Call]:
    return [_json_call(found[1]) for found in _TOOL_CALL.finditer(_spoken(text))]


def qwen3_coder_calls(text: str) -> list[Call]:
    return [_tagged_call(found[1]) for found in _TOOL_CALL.finditer(_spoken(text))]


def llama3_calls(text: str) -> list[Call]:
    """A turn that begins as JSON but has neither a name nor Llama's tag for calls is an answer, in JSON."""
    spoken = _spoken(text).strip()
    is_tagged = spoken.startswith(_PYTHON_TAG)
    spoken = spoken.removeprefix(_PYTHON_TAG).lstrip()
    if not is_tagged and not (spoken.startswith("{") and '"name"' in spoken):
        return []
    return _json_calls(spoken) or [_unreadable("it is not JSON")]


def mistral_calls(text: str) -> list[Call]:
    _, *written = _spoken(text).split(_MISTRAL_CALL)
    return [call for part in written for call in _mistral_part(part)]


CALL_FORMATS: dict[str, CallFormat] = {
    "hermes": hermes_calls,
    "qwen3_coder": qwen3_coder_calls,
    "llama3": llama3_calls,
    "mistral": mistral_calls,
}
# What a family's template writes; the first that is found decides.
_TRACES = {
    "mistral": (_MISTRAL_CALL,),
    "qwen3_coder": ("<function=",),
    "hermes": ("<tool_call>",),
    "llama3": (_PYTHON_TAG, "<|start_header_id|>ipython", "Environment: ipython"),
}


def format_of_template(template: str) -> str | None:
    """Return the name of the format that a model's chat template teaches; None when it is none of these."""
    for name, traces in _TRACES.items():
        if any(trace in template for trace in traces):
            return name
    return None


def _spoken(text: str) -> str:
    return text.rpartition(_THOUGHT_END)[2]


def _json_calls(text: str) -> list[Call]:
    """Return calls that stand one behind the other; reading ends with the first that cannot be read."""
    calls: list[Call] = []
    place = 0
    while text.startswith("{", place):
        try:
            value, place = _decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            return [*calls, _unreadable(_why(error))]
        calls.append(_call_of(value))
        between = _BETWEEN.match(text, place)
        assert between is not None
        place = between.end()
    return calls


def _json_call(text: str) -> Call:
    try:
        value, _ = _decoder.raw_decode(text.lstrip())
    except (ValueError, RecursionError) as error:
        return _unreadable(_why(error))
    return _call_of(value)


def _mistral_part(text: str) -> list[Call]:
    named = _MISTRAL_NAMED.match(text)
    try:
        value, _ = _decoder.raw_decode(text[named.end() :] if named else text.lstrip())
    except (ValueError, RecursionError) as error:
        return [_unreadable(_why(error))]
    if named:
        return [Call(named[1], value)]
    return [_call_of(each) for each in (value if isinstance(value, list) else [value])]


def _tagged_call(text: str) -> Call:
    found = _FUNCTION.match(text)
    if found is None:
        return _unreadable("there is no <function=name>...</function> in it")
    return Call(found[1].strip(), {name.strip(): value for name, value in _PARAMETER.findall(found[2])})


def _call_of(value: Any) -> Call:
    """Return the call that a JSON value is. Arguments may be JSON in a text, as in OpenAI's form."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _unreadable("it is not an object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return Call(value["name"], {}, "its arguments are not a JSON object")
    if not isinstance(arguments, dict):
        return Call(value["name"], {}, "its arguments are not a JSON object")
    return Call(value["name"], arguments)


def _why(error: Exception) -> str:
    return f"it is not JSON: {error}" if isinstance(error, ValueError) else "its JSON is nested too deeply"


def _unreadable(problem: str) -> Call:
    return Call("", {}, problem)
