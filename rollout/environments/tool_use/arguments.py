"""A call's arguments, checked against the tool's schema: OpenAI's form, which is JSON Schema."""

import ast
import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
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
_MAX_REFS = 4  # references and alternatives of one value that lead to others
_WORDS = {"true": True, "false": False, "none": None}
_MAX_PYTHON = 100_000  # characters of a list or object in Python's form


def fit_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in the schema's types. A text that is JSON or Python of the wanted type is parsed.

    schema: the tool's, {"type": "function", "function": {"parameters": ...}}. Checked are missing and unknown names
    and the types of the first level (`type`, or those in `anyOf` and `oneOf`). The tool checks everything else.
    Texts inside lists and objects are parsed by `items`, `properties` and `additionalProperties`; without a schema they
    stay texts, as in vLLM. `$ref` is followed inside the schema.
    Raises: ToolRefusal with the mistake. Example: {"n": "3"} becomes {"n": 3} where n is an integer.
    """
    parameters = _parameters_of(schema)
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    if missing := [name for name in parameters.get("required") or () if name not in arguments]:
        raise ToolRefusal(f"the argument {missing[0]} is missing")
    # JSON Schema: an object without `properties` may have any. A tool of an MCP server may declare no more.
    is_open = "properties" not in parameters and bool(parameters)
    takes_any = parameters.get("additionalProperties", is_open) is not False
    if not takes_any and (unknown := [name for name in arguments if name not in properties]):
        known = f"it has {', '.join(properties)}" if properties else "it has none"
        raise ToolRefusal(f"there is no argument {unknown[0][:100]}: {known}")
    fitted = {name: _fit(name, value, _schema_of(properties, name)) for name, value in arguments.items()}
    check_json(fitted)
    return fitted


def parse_texts(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as the policy wrote them; a text that is JSON or Python of another wanted type is parsed.

    Some call formats carry texts only. Nothing else is checked: the tool gets everything that JSON can carry.
    Raises: ToolRefusal for other values.
    """
    properties: Mapping[str, Any] = _parameters_of(schema).get("properties") or {}
    parsed = {}
    for name, value in arguments.items():
        try:
            wanted = _schema_of(properties, name)
            parsed[name] = _fit(name, value, wanted) if isinstance(value, str) else _fit_inside(value, wanted)
        except ToolRefusal:
            parsed[name] = value
    check_json(parsed)
    return parsed


def check_json(arguments: Mapping[str, Any]) -> None:
    """Raise ToolRefusal for arguments that JSON cannot carry. A policy may write them, and a library may crash."""
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        problem = "NaN, an infinite number, half a character or endless lists"
        raise ToolRefusal(f"the arguments hold values that JSON cannot carry: {problem}") from None
    level: list[Any] = [arguments]
    for _ in range(_MAX_DEPTH):
        level = [inner for each in level for inner in _parts(each) if isinstance(inner, list | dict)]
        if not level:
            return
    raise ToolRefusal(f"the arguments nest deeper than {_MAX_DEPTH} lists and objects")


def _parameters_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments with its definitions in the place of each local `$ref`."""
    parameters: Mapping[str, Any] = schema["function"].get("parameters") or {}
    if not isinstance(parameters.get("$defs") or parameters.get("definitions"), Mapping):
        return parameters
    root = copy.deepcopy(dict(parameters))
    pending: list[Any] = [root]
    while pending:
        node = pending.pop()
        places: Iterable[Any] = node.items() if isinstance(node, dict) else enumerate(node)
        for key, part in list(places):
            if isinstance(part, dict) and isinstance(part.get("$ref"), str):
                node[key] = _definition(root, part["$ref"])  # may be a part of itself; it is walked as `$defs`
            elif isinstance(part, dict | list):
                pending.append(part)
    return root


def _definition(root: Mapping[str, Any], ref: Any) -> Mapping[str, Any]:
    """Return what a `$ref` names; {}, which restricts nothing, for one outside the schema."""
    for _ in range(_MAX_REFS):
        place: Any = root if str(ref).startswith("#/") else None
        for name in str(ref).split("/")[1:]:
            place = place.get(name) if isinstance(place, Mapping) else None
        if not isinstance(place, Mapping):
            return {}
        if (ref := place.get("$ref")) is None:
            return place
    return {}


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value


def _fit(name: str, value: Any, wanted: Mapping[str, Any]) -> Any:
    kinds = _kinds_of(wanted)
    if "integer" in kinds and isinstance(value, float) and value.is_integer() and "number" not in kinds:
        return int(value)  # JSON Schema: 3.0 is an integer
    if value == "null" and "null" in kinds:
        return None  # as in vLLM: in some formats each argument is a text, and an optional text may be left out so
    if not all(kind in _TYPES for kind in kinds) or not kinds or any(_is_a(value, kind) for kind in kinds):
        return _fit_inside(value, wanted)
    if isinstance(value, str):
        for parsed in _readings(value):
            if any(_is_a(parsed, kind) for kind in kinds):
                return _fit_inside(parsed, wanted)
            if "integer" in kinds and isinstance(parsed, float) and parsed.is_integer():
                return int(parsed)
    raise ToolRefusal(f"the argument {name[:100]} is not of the type {' or '.join(kinds)}")


def _fit_inside(value: Any, wanted: Mapping[str, Any]) -> Any:
    """Return a list or object with its texts in the types that the schema names; other values as they are."""
    forms = [form for form in (wanted, *_alternatives(wanted)) if isinstance(form, Mapping)]
    if isinstance(value, list):
        items = {} if any("prefixItems" in form for form in forms) else _only_schema(forms, "items")
        return [_fit_part(part, items) for part in value]
    if isinstance(value, dict):
        properties, others = _only_schema(forms, "properties"), _only_schema(forms, "additionalProperties")
        return {name: _fit_part(part, properties.get(name, others)) for name, part in value.items()}
    return value


def _only_schema(forms: Iterable[Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    """Return the schema of a key; an empty one where alternatives have several: a text may fit each of them."""
    having = [form[key] for form in forms if isinstance(form.get(key), Mapping)]
    return having[0] if len(having) == 1 else {}


def _schema_of(properties: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    wanted = properties.get(name)
    return wanted if isinstance(wanted, Mapping) else {}  # true: anything


def _fit_part(value: Any, wanted: Any) -> Any:
    if not isinstance(wanted, Mapping) or not wanted:
        return value
    if not isinstance(value, str):
        return _fit_inside(value, wanted)
    try:
        return _fit("", value, wanted)
    except ToolRefusal:
        return value  # the tool says what is wrong inside a list or object


def _readings(text: str) -> Iterator[Any]:
    """Yield the values that a text may stand for: JSON, then Python, in which Qwen3-Coder's template writes values."""
    with suppress(ValueError, RecursionError):
        parsed = json.loads(text)
        json.dumps(parsed, allow_nan=False)  # NaN and 1e999 are no JSON
        yield parsed
    word = text.strip().lower()
    if word in _WORDS:
        yield _WORDS[word]
    elif word[:1] in ("[", "{") and len(text) <= _MAX_PYTHON:
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            yield json.loads(json.dumps(ast.literal_eval(text.strip())))


def _alternatives(wanted: Mapping[str, Any]) -> list[Any]:
    forms = next((wanted[key] for key in ("anyOf", "oneOf", "allOf") if wanted.get(key)), ())
    return forms if isinstance(forms, list) else []


def _kinds_of(wanted: Mapping[str, Any], depth: int = 0) -> list[str]:
    """Return the type names that a value may have; an empty list where the schema does not restrict them."""
    kind, forms = wanted.get("type"), _alternatives(wanted)
    if kind is None and forms and all(isinstance(form, Mapping) for form in forms) and depth < _MAX_REFS:
        each = [_kinds_of(form, depth + 1) for form in forms]
        return [kind for kinds in each for kind in kinds] if all(each) else []
    kinds: list[Any] = kind if isinstance(kind, list) else [kind]
    return kinds if all(isinstance(one, str) for one in kinds) else []


def _is_a(value: Any, kind: str) -> bool:
    # bool is an integer in Python, but not in JSON.
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
