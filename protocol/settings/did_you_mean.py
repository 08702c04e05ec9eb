"""The most likely setting for a name that does not exist."""

import difflib
import re
from collections.abc import Sequence

from protocol.settings.elsewhere import ALWAYS, elsewhere

HELP_ALL = "sluice run --help all lists every setting."
# Value in another trainer: its name here.
_VALUES_ELSEWHERE = {"fp32": "float32", "bf16": "bfloat16", "avg": "mean"}


def unknown_setting(name: str, known: Sequence[str]) -> str:
    """Return the sentence about a name that is not among the `known` dotted names, with the likeliest one."""
    if "." in name and name in known:
        section, key = name.split(".", 1)
        below = f"{section}: {{{key}: ..}}"
        return f"settings: {name} is written as one key. In a YAML file it goes below its section: {below}."
    if otherwise := _otherwise(name):
        return f"settings: {name} does not exist. {otherwise}"
    sections = {setting.partition(".")[0] for setting in known}
    if "." not in name and (near := difflib.get_close_matches(name, sections, n=1, cutoff=0.8)):
        return f"settings: {name} does not exist. Did you mean the section {near[0]}?"
    likeliest = _likeliest(name, known)
    hint = f"Did you mean {likeliest}?" if likeliest else HELP_ALL
    return f"settings: {name} does not exist. {hint}"


def written_as_option(text: str, known: Sequence[str]) -> str | None:
    """Return the sentence about `learner.lr=1e-6` or a file's name in place of an option; None for other texts."""
    if text == "@" or text.lstrip("@").endswith((".yaml", ".yml", ".toml", ".json")):
        return f"settings: {text} is not an option. Give a YAML file of settings as --config FILE."
    name, equals, value = text.lstrip("+").partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
        return None
    if name in known:
        return f"settings: {text} is not an option. Write --{name} {value}."
    likeliest = _likeliest(name, known)
    hint = f"Write --{likeliest} {value}, if it is the same setting." if likeliest else HELP_ALL
    return f"settings: {text} is not an option. {_otherwise(name) or hint}"


def likeliest_value(given: object, expected: str) -> str:
    """Return " Did you mean VALUE?" for one of the values in `expected one of A, B or C`; "" when none is close."""
    _, listed, values = expected.partition("expected one of ")
    names = re.split(r", | or ", values) if listed else []
    alias = _VALUES_ELSEWHERE.get(str(given).lower())
    close = [alias] if alias in names else difflib.get_close_matches(str(given), names, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def _likeliest(name: str, known: Sequence[str]) -> str | None:
    """Return the first of: a map with a key appended, a misspelt section, another trainer's name, another section, a
    misspelling."""
    for setting in known:
        if "." in setting and name.startswith(f"{setting}."):
            return setting
    section, _, key = name.partition(".")
    for near in difflib.get_close_matches(section, {setting.partition(".")[0] for setting in known}, n=1, cutoff=0.8):
        if f"{near}.{key}" in known:
            return f"{near}.{key}"
    if (option := elsewhere(name)) and option.setting in known:
        return option.setting
    last = name.rpartition(".")[2].replace("-", "_")
    same = [setting for setting in known if setting.rpartition(".")[2] == last]
    if same:
        return min(same, key=lambda setting: (setting.startswith("critic."), len(setting)))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return close[0] if close else None


def _otherwise(name: str) -> str | None:
    """Return what does the same as another trainer's option that is no setting here."""
    option = elsewhere(name)
    if option is None or option.is_setting:
        return None
    return f"{option.conversion}.{' Remove it.' if option.setting == ALWAYS else ''}"
