"""Arguments of a call against the schema of its tool."""

import json
import math
from typing import Any

import pytest

from rollout.environments.base import ToolRefusal
from rollout.environments.tool_use.arguments import fit_arguments, parse_texts

SCHEMA = {
    "function": {
        "parameters": {
            "properties": {
                "text": {"type": "string"},
                "n": {"type": "integer"},
                "flag": {"type": "boolean"},
                "any": {},
                "list": {"type": "array"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "either": {"type": ["number", "string"]},
                "other": {"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/Other"}]},
            },
            "required": ["text"],
        }
    }
}


def test_text_that_is_the_json_of_its_type_becomes_that() -> None:
    given = {"text": "1", "n": "3", "flag": "true", "any": "7", "list": "[1, 2]"}
    assert fit_arguments(given, SCHEMA) == {"text": "1", "n": 3, "flag": True, "any": "7", "list": [1, 2]}
    given = {"text": "1", "maybe": "3", "either": "3", "other": "3"}
    assert fit_arguments(given, SCHEMA) == {"text": "1", "maybe": 3, "either": "3", "other": "3"}
    assert fit_arguments({"text": "1", "maybe": None}, SCHEMA) == {"text": "1", "maybe": None}


def test_text_in_the_form_of_python_becomes_its_type() -> None:
    given = {"text": "None", "n": "3.0", "flag": "False", "list": "['a', None]", "maybe": "None"}
    assert fit_arguments(given, SCHEMA) == {"text": "None", "n": 3, "flag": False, "list": ["a", None], "maybe": None}


@pytest.mark.parametrize("fit", [fit_arguments, parse_texts])
@pytest.mark.parametrize("kind", [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "null"]}])
def test_null_as_a_text_leaves_an_optional_text_out(fit: Any, kind: Any) -> None:
    schema = {"function": {"parameters": {"properties": {"maybe": kind, "text": {"type": "string"}}}}}
    assert fit({"maybe": "null", "text": "null"}, schema) == {"maybe": None, "text": "null"}
    assert fit({"maybe": "nullable"}, schema) == {"maybe": "nullable"}


def test_whole_number_is_an_integer() -> None:
    assert fit_arguments({"text": "1", "n": 3.0}, SCHEMA) == {"text": "1", "n": 3}


@pytest.mark.parametrize("fit", [fit_arguments, parse_texts])
def test_texts_inside_lists_and_objects_become_the_types_that_the_schema_names(fit: Any) -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}, "name": {"type": "string"}}}
    fields = {
        "k": {"type": "array", "items": point},
        "m": {"anyOf": [{"type": "null"}, {"items": {"type": "integer"}}]},
    }
    schema = {"function": {"parameters": {"properties": fields}}}
    given = {"k": [{"x": "1.5", "name": "2", "z": "3"}, {"x": "far"}], "m": ["1", None, "one"]}
    wanted = {"k": [{"x": 1.5, "name": "2", "z": "3"}, {"x": "far"}], "m": [1, None, "one"]}
    fields["either"] = {"anyOf": [{"items": {"type": "integer"}}, {"items": {"type": "string"}}]}
    fields["first"] = {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}
    as_written = {"either": ["1"], "first": ["1"], "any": ["1"]}
    assert fit(as_written, {"function": {"parameters": {"properties": {**fields, "any": True}}}}) == as_written
    assert fit(given, schema) == fit({"k": json.dumps(given["k"]), "m": given["m"]}, schema) == wanted


@pytest.mark.parametrize("fit", [fit_arguments, parse_texts])
def test_reference_inside_the_schema_is_followed(fit: Any) -> None:
    place = {"properties": {"x": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}}}
    kinds = {
        "Place": place,
        "Size": {"type": "integer"},
        "Same": {"$ref": "#/$defs/Size"},
        "Loop": {"$ref": "#/$defs/Loop"},
    }
    fields = {
        "n": {"allOf": [{"$ref": "#/$defs/Same"}]},
        "at": {"items": {"$ref": "#/$defs/Place"}},
        "far": {"$ref": "http://a/b#/c"},
        "loop": {"$ref": "#/$defs/Loop"},
    }
    schema = {"function": {"parameters": {"properties": fields, "$defs": kinds}}}
    given = {"n": "3", "at": [{"x": "1.5", "next": {"x": "2", "next": None}}], "far": "1", "loop": "1"}
    wanted = {"n": 3, "at": [{"x": 1.5, "next": {"x": 2, "next": None}}], "far": "1", "loop": "1"}
    assert fit(given, schema) == wanted


@pytest.mark.parametrize("value", ["[b'a']", "{1: {2}}", "[" * 9000, "__import__('os')", "[1e999]", "{[]: 1}", "[NaN]"])
def test_text_that_json_cannot_carry_does_not_become_a_list(value: str) -> None:
    with pytest.raises(ToolRefusal):
        fit_arguments({"text": "a", "list": value}, SCHEMA)


def test_arguments_stay_as_they_were_written_but_for_texts_of_another_type() -> None:
    given = {"text": 72, "n": "3", "flag": "maybe", "list": None, "more": "1"}
    assert parse_texts(given, SCHEMA) == {**given, "n": 3}


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800", {"\ud800": 1}, json.loads("[" * 40 + "]" * 40)])
def test_arguments_that_no_json_carries_are_refused(value: Any) -> None:
    with pytest.raises(ToolRefusal, match=r"the arguments (hold values that JSON cannot carry|nest deeper than 32)"):
        fit_arguments({"text": "a", "any": value}, SCHEMA)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "the argument text is missing"),
        ({"text": "a", "m": 1}, "there is no argument m: it has text, n, flag, any, list, maybe, either, other"),
        ({"text": "a", "maybe": "x"}, "the argument maybe is not of the type integer or null"),
        ({"text": "a", "n": "three"}, "the argument n is not of the type integer"),
        ({"text": "a", "n": True}, "the argument n is not of the type integer"),
        ({"text": 1}, "the argument text is not of the type string"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ToolRefusal) as refused:
        fit_arguments(given, SCHEMA)
    assert str(refused.value) == problem


def test_schema_without_parameters_takes_nothing() -> None:
    assert fit_arguments({}, {"function": {}}) == {}
    with pytest.raises(ToolRefusal, match="there is no argument a: it has none"):
        fit_arguments({"a": 1}, {"function": {}})


@pytest.mark.parametrize(
    "parameters", [{"type": "object"}, {"properties": {}, "additionalProperties": {}}, {"additionalProperties": True}]
)
def test_schema_of_an_object_that_says_no_properties_takes_any(parameters: dict[str, Any]) -> None:
    assert fit_arguments({"a": 1}, {"function": {"parameters": parameters}}) == {"a": 1}


@pytest.mark.parametrize("parameters", [{"properties": {}}, {"type": "object", "additionalProperties": False}])
def test_schema_that_says_that_it_has_none_takes_nothing(parameters: dict[str, Any]) -> None:
    with pytest.raises(ToolRefusal, match="there is no argument a: it has none"):
        fit_arguments({"a": 1}, {"function": {"parameters": parameters}})
