"""Loads `Settings` from one YAML file and `--section.field value` options; every mistake becomes one clear sentence.

Command line over file over recipe over defaults; lists and maps as JSON.
"""

import argparse
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError as UnparsableOption

from protocol.disk.files import replace_file
from protocol.errors import SettingsError
from protocol.node.home import sluice_home
from protocol.settings.did_you_mean import HELP_ALL, likeliest_value, unknown_setting, written_as_option
from protocol.settings.learner import DEFAULT_RECIPE
from protocol.settings.section import Section
from protocol.settings.settings import IS_SAVED, Settings

GIVEN = "given.yaml"  # given settings, in the folder of the resolved ones


def load_settings(config: Path | None, options: Sequence[str], folder: Path | None = None) -> Settings:
    """Return the settings of a YAML file (may be None) with command-line options laid over it.

    folder: where relative paths start; None: paths stay as they are.
    Raises: SettingsError naming the setting, its value, the expected form and the change to make.
    """
    from_file = read_yaml(config) if config else {}
    from_options = _parse_options(options)
    _check_recipe_has_effect(config, from_file, from_options)
    return validate_settings(_merge(from_file, from_options), None if folder is None else {"folder": folder})


def load_saved_settings(path: Path) -> Settings:
    """Return the resolved settings of a run folder. Settings that this version does not have are ignored.

    Combinations are not checked: an earlier version allowed some that this one refuses.

    Raises: SettingsError when the file cannot be read.
    """
    return validate_settings(_existing_fields(read_yaml(path), Settings), {IS_SAVED: True})


def names_own_run(options: Sequence[str]) -> bool:
    """Return whether command-line options name a model or prompts: then the quick start's are not used."""
    given = _parse_options(options)
    return any(isinstance(given.get(room), dict) and key in given[room] for room, key in _OWN)


def settings_help() -> str:
    """Return the text that documents every setting, for `--help`."""
    parser = _Parser(
        prog="", add_help=False, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    CliSettingsSource(_OnCommandLine, cli_parse_args=[], root_parser=parser)
    return parser.format_help()


def describe_settings(settings: Settings) -> list[tuple[str, str, bool]]:
    """Return (name, value as the command line takes it, differs from its default) of every setting, in order."""
    defaults = dict(_flatten("", Settings().model_dump(mode="json")))
    given = _flatten("", settings.model_dump(mode="json"))
    return [(name, _as_option(value), value != defaults.get(name)) for name, value in given]


def save_settings(settings: Settings, path: Path) -> None:
    """Write the resolved settings as YAML that `--config` reads back, and the given ones as given.yaml next to it."""
    for content, file in ((settings.given_settings(), path.with_name(GIVEN)), (settings.model_dump(mode="json"), path)):
        replace_file(file, yaml.safe_dump(content, sort_keys=False).encode())


def saved_run_name(content: bytes) -> str | None:
    """Return the run.name in a file of `save_settings`; None without one."""
    try:
        run = yaml.safe_load(content)["run"]
        return str(run["name"])
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        return None


# A settings file's words for pydantic's kinds of errors.
_KINDS = {
    "model_type": "expected a map of settings; leave out a section that has none",
    "dict_type": "expected a map of names and values, {} for none",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "bool_parsing": "expected true or false",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected {ge} or more",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected {le} or less",
    "finite_number": "expected a finite number",
    "url_parsing": "expected a URL such as http://HOST:PORT/PATH",
    "url_scheme": "expected a URL such as http://HOST:PORT/PATH",
}
_STOP = "sampling.stop"
_OWN = (("policy", "model"), ("data", "train"))


class _OnCommandLine(Settings, BaseSettings):
    """The settings from command-line options only: no environment variable may change a run."""

    model_config = SettingsConfigDict(extra="allow", cli_avoid_json=False)

    @classmethod
    def settings_customise_sources(cls, *_: Any, **__: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        return ()


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # argparse takes -1e-3 for an option

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"argument (\S+): expected one argument", r"\1 has no value; give one after it", message)
        message = re.sub(r"unrecognized arguments: (.*)", r"\1 is not an option; write --SECTION.NAME VALUE", message)
        raise SettingsError(f"settings: {message}. {HELP_ALL}")


def validate_settings(given: dict[str, Any], context: dict[str, Any] | None = None) -> Settings:
    """Return checked settings. Raises: SettingsError with a sentence for each mistake."""
    try:
        return Settings.model_validate(given, context=context)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None


def _parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Return the options as a nested mapping, unvalidated. Raises: SettingsError for a name that does not exist."""
    known = {name for name, _ in _flatten("", Settings().model_dump(mode="json"))} | set(Settings.model_fields)
    for before, option in zip(["", *options], options, strict=False):
        is_value = before.startswith("--") and "=" not in before
        if not is_value and (sentence := written_as_option(option, sorted(known))):
            raise SettingsError(sentence)
        if option.startswith("--") and (name := option[2:].partition("=")[0]) not in known:
            # A key inside a map setting (--rollout.engine_args.seed) is not an option: maps are given as JSON.
            raise SettingsError(unknown_setting(name, sorted(known)))
    _check_given_once(options)
    parser = _Parser(add_help=False, allow_abbrev=False)
    shown, content = _without_content(options)
    try:
        parsed = dict(CliSettingsSource(_OnCommandLine, cli_parse_args=shown, root_parser=parser)())
    except UnparsableOption as error:
        raise SettingsError(_explain_unparsable(str(error), sorted(known, key=len), options)) from None
    for name, text in content.items():
        *sections, key = name.split(".")
        place = parsed
        for section in sections:
            place = place[section]
        place[key] = json.loads(text) if place[key] in ([], {}) else text  # or it is a setting of text
    return parsed


def _without_content(options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the options with empty lists and maps in place of what pydantic-settings changes, and this by setting.

    It takes a list's \\n for two letters, strips a bare text and cuts it at each comma.
    """
    shown, content = [*options], dict[str, str]()
    for place, option in enumerate(options):
        name, equals, value = option.partition("=")
        value, after = (value, place) if equals else ("".join(options[place + 1 : place + 2]), place + 1)
        is_read_here = "\\" in value
        if name == f"--{_STOP}":
            value, is_read_here = _list_of_texts(value), True
        is_json = value.lstrip()[:1] in ("[", "{")
        if name.startswith("--") and name[2:] not in Settings.model_fields and is_json and is_read_here:
            with contextlib.suppress(ValueError):  # it is explained as any other wrong value
                empty = str(type(json.loads(value))())
                shown[after] = f"{name}={empty}" if equals else empty
                content[name[2:]] = value
    return shown, content


def _list_of_texts(value: str) -> str:
    """Return a list of texts as JSON. value: such a list, or one text. Raises: SettingsError for a bare comma."""
    if value.lstrip()[:1] == "[":
        return value
    with contextlib.suppress(ValueError):
        if isinstance(text := json.loads(value), str):  # it is in quotes
            return json.dumps([text])
    if "," in value:
        both = json.dumps([value]), json.dumps(value.split(","))
        raise SettingsError(f"settings: {_STOP} = {value} is one text or several. Give '{both[0]}' or '{both[1]}'.")
    return json.dumps([value])


def _check_given_once(options: Sequence[str]) -> None:
    """Raise SettingsError for an option with two values, of which the last would win."""
    values: dict[str, str] = {}
    for name, value in _given_values(options):
        if values.setdefault(name, value) != value:
            both = _without_secrets(f"as {values[name]} and as {value}")
            raise SettingsError(f"settings: {name} is given twice, {both}. Give it once.")


def _explain_unparsable(error: str, known: Sequence[str], options: Sequence[str]) -> str:
    name = next((each for each in reversed(known) if re.search(rf"\b{each}\b", error)), "")
    reason = error.partition(f"{name}: ")[2]
    if not reason or "unpack" in reason:  # from a parser of pairs of names and values
        reason = "it is not the expected JSON"
    value = _without_secrets(dict(_given_values(options)).get(name, ""))
    example = """'["a", "b"]' or '{"name": 1}'"""
    return f"settings: {name} = {value} is wrong: {reason}. Give lists and maps as JSON, in single quotes: {example}."


def _given_values(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each setting on the command line, and its value."""
    for option, after in zip(options, [*options[1:], ""], strict=False):
        name, equals, value = option.partition("=")
        if name.startswith("--"):
            yield name.removeprefix("--"), value if equals else after


def _check_recipe_has_effect(config: Path | None, from_file: dict[str, Any], from_options: dict[str, Any]) -> None:
    """Raise SettingsError for another recipe over a run's resolved settings, which would override all of it."""
    in_file, in_options = _learner(from_file), _learner(from_options)
    recipe, other = in_file.get("recipe", DEFAULT_RECIPE), in_options.get("recipe")
    if other not in (None, recipe) and {"advantage", "loss", "clip_high", "betas"} <= in_file.keys():
        raise SettingsError(
            f"settings: learner.recipe = {other} has no effect: {config} has every setting, with recipe {recipe}'s "
            f"values. Give the file of the given settings in the same folder, {GIVEN}."
        )


def _learner(given: dict[str, Any]) -> dict[str, Any]:
    learner = given.get("learner")
    return learner if isinstance(learner, dict) else {}


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        is_cleared = value == {} and key not in Settings.model_fields
        is_merged = isinstance(old, dict) and isinstance(value, dict) and not is_cleared
        merged[key] = _merge(dict(old or {}), value) if is_merged else value
    return merged


def _existing_fields(given: Any, kind: Any) -> Any:
    """Return a value without the fields that its section, or its list's section, does not have in this version."""
    if isinstance(given, list) and get_origin(kind) is list:
        return [_existing_fields(each, get_args(kind)[0]) for each in given]
    section = _section_of(kind)
    if section is None or not isinstance(given, dict):
        return given
    fields = section.model_fields
    return {name: _existing_fields(value, fields[name].annotation) for name, value in given.items() if name in fields}


def _section_of(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _flatten(prefix: str, value: Any, model: type[Section] | None = Settings) -> list[tuple[str, Any]]:
    """Return dotted names and values; a map that is itself one setting (engine_args) stays whole."""
    if model is None:
        return [(prefix, value)]
    pairs = []
    for key, field in model.model_fields.items():
        pairs += _flatten(f"{prefix}.{key}" if prefix else key, value[key], _section_of(field.annotation))
    return pairs


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        # A part in brackets is pydantic's name of one type among several.
        name = ".".join(str(part) for part in problem["loc"] if "[" not in str(part))
        if problem["type"] == "extra_forbidden":
            known = [known_name for known_name, _ in _flatten("", Settings().model_dump(mode="json"))]
            lines.append(unknown_setting(name, known))
        elif problem["type"] == "value_error" and name in ("", *Settings.model_fields):  # the text names settings
            text = str(problem["ctx"]["error"])
            lines.append(f"settings: {text if text.endswith('?') else text.rstrip('.') + '.'}")
        else:
            lines.append(_explain_value(name, problem))
    return "\n".join(lines)


def _explain_value(name: str, problem: Any) -> str:
    """Return the sentence about a wrong value, or a part that is missing in one."""
    given = problem["input"]
    bounds = problem.get("ctx", {})
    context = {name: f"{bound:.10g}" if isinstance(bound, float) else bound for name, bound in bounds.items()}
    value = "null" if given is None else _without_secrets(repr(given))
    if problem["type"] == "missing":
        return f"settings: {name} is missing in {value}. Add it."
    message = _KINDS.get(problem["type"], problem["msg"])
    message = (
        (message.format_map(context) if problem["type"] in _KINDS and context else message)
        .removeprefix("Value error, ")
        .rstrip(".")
    )
    if problem["type"] == "literal_error":
        message = "expected one of " + context["expected"].replace("'", "")
    if isinstance(given, str) and problem["type"] == "model_type" and name.startswith("rewards.endpoints."):
        message = """expected '[{"name": "mine", "url": "http://HOST:PORT/PATH"}]'"""
    return f"settings: {name} = {value} is wrong: {message}.{likeliest_value(given, message)}"


def _without_secrets(value: str) -> str:
    """Return the text without the passwords and keys of its URLs: a log may keep the message."""
    value = re.sub(r"//[^/@\s]+@", "//***@", value)
    return re.sub(r"(?<=://)([^\s?'\"]+)\?[^\s'\"]+", r"\1?***", value)


def _as_option(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# Files that the cluster makes, such as the quick start's, are relative to its home.
_HOME_VARIABLE = "$SLUICE_HOME"


def read_yaml(path: Path, option: str = "--config") -> dict[str, Any]:
    """Return a settings file's content, unvalidated; {} for an empty one. option: the option that named the file.

    Raises: SettingsError for a file that cannot be read, is not YAML, is not a map, has a key twice, or has a number
    that YAML reads as another one.
    """
    try:
        text = path.read_text(encoding="utf-8").replace(_HOME_VARIABLE, str(sluice_home()))
        content = yaml.load(text, _Unambiguous)  # noqa: S506 it is a SafeLoader
    except OSError as error:
        raise SettingsError(
            f"settings: {option} {path} cannot be read: {error.strerror}. Give an existing YAML file."
        ) from None
    except _AmbiguousError as error:
        raise SettingsError(f"settings: {option} {path} {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings: {option} {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"settings: {option} {path} is not a map of settings, such as learner: {{lr: 1.0e-6}}. See "
            "docs/look_up/settings.md."
        )
    return content


# YAML 1.1 reads 010 as octal and 1:30 as sexagesimal.
_OTHER_NUMBER = re.compile(r"[-+]?(0[0-7_]*[0-7]|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


class _AmbiguousError(Exception):
    """A key occurs twice in one map, or YAML reads a number differently than a person."""


class _Unambiguous(yaml.SafeLoader):
    """Refuses repeated keys, of which PyYAML keeps the last, and 010 and 1:30, which it reads as 8 and 90."""

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        is_whole = node.tag == "tag:yaml.org,2002:int"
        number = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        text = str(node.value)
        if _OTHER_NUMBER.fullmatch(text):
            raise _AmbiguousError(
                f"line {node.start_mark.line + 1} has {text}, which YAML reads as {number:g}. Write a plain number, or "
                f"'{text}' for text."
            )
        return number

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, str | int) and key in seen:
                raise _AmbiguousError(
                    f"line {line} has {key} again, which line {seen[key]} has already. Keep one of the two."
                )
            if isinstance(key, str | int):
                seen[key] = line
        return super().construct_mapping(node, deep)


for _kind in ("int", "float"):
    _Unambiguous.add_constructor(f"tag:yaml.org,2002:{_kind}", _Unambiguous.construct_number)
