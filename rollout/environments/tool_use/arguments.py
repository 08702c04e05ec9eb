"""What a call gives a tool, held against the tool's schema: OpenAI's, which is JSON Schema."""

import json
from collections.abc import Mapping
from typing import Any

from rollout.environments.base import ToolRefusal

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def fitted(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as the schema has them; a text that is the JSON of the type asked for becomes that.

    schema: of the tool, {"type": "function", "function": {"parameters": ...}}. Checked are required and unknown names
    and the types of the first level: what a tool needs beyond them it checks itself.
    Raises: ToolRefusal with what is wrong. Example: {"n": "3"} becomes {"n": 3} where n is an integer.
    """
    parameters = schema["function"].get("parameters") or {}
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    if missing := [name for name in parameters.get("required") or () if name not in arguments]:
        raise ToolRefusal(f"the argument {missing[0]} is missing")
    if not parameters.get("additionalProperties") and (unknown := [n for n in arguments if n not in properties]):
        known = f"it has {', '.join(properties)}" if properties else "it has none"
        raise ToolRefusal(f"there is no argument {unknown[0][:100]}: {known}")
    return {name: _fitted(name, value, properties.get(name) or {}) for name, value in arguments.items()}


def _fitted(name: str, value: Any, wanted: Mapping[str, Any]) -> Any:
    kind = wanted.get("type")
    if not isinstance(kind, str) or kind not in _TYPES or _is_a(value, kind):
        return value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            read = value
        if _is_a(read, kind):
            return read
    raise ToolRefusal(f"the argument {name[:100]} is not of the type {kind}")


def _is_a(value: Any, kind: str) -> bool:
    # A truth value is an integer in Python, and none in JSON.
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
