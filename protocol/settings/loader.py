"""Loads `Settings` from one YAML file and `--section.field value` options; every mistake becomes one clear sentence.

Command line over file over defaults; lists and maps as JSON.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.exceptions import SettingsError as UnparsableOption

from protocol.disk.files import replace_file
from protocol.errors import SettingsError
from protocol.settings.algorithm.recipes import DEFAULT_RECIPE, names_of_recipes
from protocol.settings.did_you_mean import unknown_setting
from protocol.settings.section import Section
from protocol.settings.settings import Settings
from protocol.settings.yaml_file import read_yaml


def load_settings(config: Path | None, options: Sequence[str]) -> Settings:
    """Return the settings of a YAML file (may be None) with command-line options laid over it.

    Raises: SettingsError naming the setting, its value, what was expected and what to change.
    """
    from_file = read_yaml(config) if config else {}
    try:
        return Settings.model_validate(_laid_over(from_file, _parse_options(options)))
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None


def names_own_run(options: Sequence[str]) -> bool:
    """Return whether command-line options name a model or prompts: such a command is a run of the user's own."""
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
    return [(name, _shown(value), value != defaults.get(name)) for name, value in given]


def save_settings(settings: Settings, path: Path) -> None:
    """Write the resolved settings as YAML that `--config` reads back."""
    replace_file(path, yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False).encode())


def saved_run_name(content: bytes) -> str | None:
    """Return the run.name in what `save_settings` wrote; None where none stands there."""
    try:
        run = yaml.safe_load(content)["run"]
        return str(run["name"])
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        return None


# In the words of a settings file, where pydantic names its own kinds.
_KINDS = {
    "model_type": "expected a map of settings; leave out a section that has none",
    "dict_type": "expected a map of names and values, {} for none",
}
_OWN = (("policy", "model"), ("data", "train"))


class _OnCommandLine(Settings, BaseSettings):
    """The same settings, read from command-line options only: no environment variable may change a run unseen."""

    model_config = SettingsConfigDict(extra="allow", cli_avoid_json=False)

    @classmethod
    def settings_customise_sources(cls, *_: Any, **__: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        return ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"settings: {message}. --help lists every setting.")


def _parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Return the options as a nested mapping, unvalidated. Raises SettingsError for a name that does not exist."""
    known = {name for name, _ in _flatten("", Settings().model_dump(mode="json"))} | set(Settings.model_fields)
    for option in options:
        if option.startswith("--") and (name := option[2:].partition("=")[0]) not in known:
            # A key inside a map setting (--rollout.engine_args.seed) is not an option: maps are given as JSON.
            raise SettingsError(unknown_setting(name, sorted(known)))
    parser = _Parser(add_help=False, allow_abbrev=False)
    try:
        return dict(CliSettingsSource(_OnCommandLine, cli_parse_args=list(options), root_parser=parser)())
    except UnparsableOption as error:
        raise SettingsError(_explain_unparsable(str(error), sorted(known, key=len), options)) from None


def _explain_unparsable(error: str, known: Sequence[str], options: Sequence[str]) -> str:
    name = next((each for each in reversed(known) if re.search(rf"\b{each}\b", error)), "")
    reason = error.partition(f"{name}: ")[2]
    if not reason or "unpack" in reason:  # of a parser that wanted pairs of names and values
        reason = "it is no JSON of what is expected"
    value = _without_secrets(_given(name, options))
    example = """'["a", "b"]' or '{"name": 1}'"""
    return f"settings: {name} = {value} is wrong: {reason}. Give lists and maps as JSON, in single quotes: {example}."


def _given(name: str, options: Sequence[str]) -> str:
    """Return the last value that the command line gives a setting."""
    for place in reversed(range(len(options))):
        if options[place].startswith(f"--{name}="):
            return options[place].partition("=")[2]
        if options[place] == f"--{name}":
            return "".join(options[place + 1 : place + 2])
    return ""


def _laid_over(from_file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a file's settings under those of the command line.

    A file that a run saved holds every setting. Where the command line names another recipe than the file does, what
    the file has from its own recipe gives way to it: a recipe of which nothing is taken would be a name.
    """
    recipe = _recipe(from_file) or DEFAULT_RECIPE
    is_changed = _recipe(given) not in (None, recipe)
    return _merge(_without_recipe(from_file, recipe) if is_changed else from_file, given)


def _recipe(given: dict[str, Any]) -> Any:
    learner = given.get("learner")
    return learner.get("recipe") if isinstance(learner, dict) else None


def _without_recipe(from_file: dict[str, Any], recipe: str) -> dict[str, Any]:
    """Return the file's settings less those that any recipe names and that stand as this one has them."""
    own = Settings.model_validate({"learner": {"recipe": recipe}}).model_dump(mode="json")
    kept = dict(from_file)
    for section, names in names_of_recipes().items():
        if isinstance(given := from_file.get(section), dict):
            kept[section] = {k: v for k, v in given.items() if k not in names or v != own[section][k]}
    return kept


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _flatten(prefix: str, value: Any, model: type[Section] | None = Settings) -> list[tuple[str, Any]]:
    """Return dotted names and values; a map that is itself one setting (engine_args) stays whole."""
    if model is None:
        return [(prefix, value)]
    pairs = []
    for key, field in model.model_fields.items():
        inner = field.annotation
        section = inner if isinstance(inner, type) and issubclass(inner, Section) else None
        pairs += _flatten(f"{prefix}.{key}" if prefix else key, value[key], section)
    return pairs


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = [known_name for known_name, _ in _flatten("", Settings().model_dump(mode="json"))]
            lines.append(unknown_setting(name, known))
        elif problem["type"] == "value_error" and not name:
            lines.append(f"settings: {problem['ctx']['error']}")
        else:
            value = "null" if problem["input"] is None else _without_secrets(repr(problem["input"]))
            message = _KINDS.get(problem["type"], problem["msg"]).removeprefix("Value error, ").rstrip(".")
            lines.append(f"settings: {name} = {value} is wrong: {message}.")
    return "\n".join(lines)


def _without_secrets(value: str) -> str:
    """Return it without the password or key in a URL that was refused: the message may be kept in a log."""
    value = re.sub(r"//[^/@\s]+@", "//***@", value)
    return re.sub(r"(?<=://)([^\s?'\"]+)\?[^\s'\"]+", r"\1?***", value)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
