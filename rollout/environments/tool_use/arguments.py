"""What a call gives a tool, held against the tool's schema: OpenAI's, which is JSON Schema."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rollout.environments.base import ToolRefusal

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_MAX_DEPTH = 32


def fitted(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as the schema has them; a text that is the JSON of the type asked for becomes that.

    schema: of the tool, {"type": "function", "function": {"parameters": ...}}. Checked are required and unknown names
    and the types of the first level (`type`, or those of `anyOf` and `oneOf`): what a tool needs beyond them it checks
    itself. Raises: ToolRefusal with what is wrong. Example: {"n": "3"} becomes {"n": 3} where n is an integer.
    """
    parameters = schema["function"].get("parameters") or {}
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    if missing := [name for name in parameters.get("required") or () if name not in arguments]:
        raise ToolRefusal(f"the argument {missing[0]} is missing")
    # An object whose properties are not said may have any (JSON Schema); a tool of an MCP server may say no more.
    says_none = "properties" not in parameters and bool(parameters)
    takes_any = parameters.get("additionalProperties", says_none) is not False
    if not takes_any and (unknown := [name for name in arguments if name not in properties]):
        known = f"it has {', '.join(properties)}" if properties else "it has none"
        raise ToolRefusal(f"there is no argument {unknown[0][:100]}: {known}")
    made = {name: _fitted(name, value, properties.get(name) or {}) for name, value in arguments.items()}
    check_json(made)
    return made


def check_json(arguments: Mapping[str, Any]) -> None:
    """Raise ToolRefusal for arguments that no JSON carries: a policy may write them, and a library may end of them."""
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        what = "NaN, a number without bounds, half a character or lists without end"
        raise ToolRefusal(f"the arguments hold what JSON does not carry: {what}") from None
    level: list[Any] = [arguments]
    for _ in range(_MAX_DEPTH):
        level = [inner for each in level for inner in _parts(each) if isinstance(inner, list | dict)]
        if not level:
            return
    raise ToolRefusal(f"the arguments nest deeper than {_MAX_DEPTH} lists and objects")


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value


def _fitted(name: str, value: Any, wanted: Mapping[str, Any]) -> Any:
    kinds = _kinds_of(wanted)
    if not all(kind in _TYPES for kind in kinds) or not kinds or any(_is_a(value, kind) for kind in kinds):
        return value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            read = value
        if any(_is_a(read, kind) for kind in kinds):
            return read
    raise ToolRefusal(f"the argument {name[:100]} is not of the type {' or '.join(kinds)}")


def _kinds_of(wanted: Mapping[str, Any]) -> list[str]:
    """Return the names of the types that a value may have; none where the schema does not say them so."""
    kind = wanted.get("type")
    forms = wanted.get("anyOf") or wanted.get("oneOf")
    if kind is None and isinstance(forms, list) and all(isinstance(form, Mapping) for form in forms):
        each = [_kinds_of(form) for form in forms]
        return [kind for kinds in each for kind in kinds] if all(each) else []
    kinds: list[Any] = kind if isinstance(kind, list) else [kind]
    return kinds if all(isinstance(one, str) for one in kinds) else []


def _is_a(value: Any, kind: str) -> bool:
    # A truth value is an integer in Python, and none in JSON.
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
