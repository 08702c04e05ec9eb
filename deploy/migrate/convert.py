"""Options of another trainer, by its table, to settings with the reason of each."""

import ast
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.settings.elsewhere import ALWAYS, JOINT, MISSING, Option, option_named, options_of

NOT_SAID = (None, "null", "None", "")
_TRUE = ("true", "1", "yes", "y", "t")  # of transformers' parser
_PASSWORD = re.compile(r"//[^/@\s]+@")
_SECRET = re.compile(r"\b(hf_|sk-|ghp_)\w{16,}")  # tokens of hubs and of model services
_NAME_OF_SECRET = re.compile(r"(^|[._-])(api_?key|token|secret|password)$|(^|\.)key$|use_wandb", re.I)
_WORDS = {
    "aggregate": {
        "token-mean": "token_mean",
        "seq-mean-token-sum": "seq_mean_token_sum",
        "seq-mean-token-mean": "seq_mean_token_mean",
        "seq-mean-token-sum-norm": "seq_sum_norm",
    },
    "dtype": {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "True": "bfloat16"},
    "kl_form": {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"},
    "schedule": {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
    },
    "optimizer": {"True": "optimizer", "False": "none"},
    "ipo": {"True": "ipo", "False": "sigmoid"},
    "mask": {"True": "mask", "False": "keep"},
}


@dataclass
class Draft:
    """Settings of the new file, and the options that have none."""

    trainer: str
    options: dict[str, Option]  # the trainer's table, by name
    asked: dict[str, str] = field(default_factory=dict)  # usual name -> value, as text
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)  # dotted name -> value, comment
    always: dict[str, str] = field(default_factory=dict)  # option with its value -> reason
    missing: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)  # what to do before the run
    read: set[str] = field(default_factory=set)  # usual names that joint conversions have used

    def text(self, name: str, default: str = "") -> str:
        """Return an option's value, or the other trainer's default."""
        self.read.add(name)
        value = self.asked.get(name)
        return default if value in NOT_SAID else str(value)

    def number(self, name: str, default: float = 0) -> Any:
        """Return an option's number; the default for text, which is listed then."""
        value = value_of(self.text(name, str(default)))
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
        self.missing.setdefault(self.label(name), f"It is not a number; {default:g} is written")
        return default

    def is_on(self, name: str, default: bool = False) -> bool:
        return self.text(name, str(default)).lower() in _TRUE

    def put(self, setting: str, value: Any, *names: str, why: str = "") -> None:
        """Write a setting. names: the options that it follows from; why: what differs."""
        given = [self.label(name) for name in names if name in self.asked]
        missing = [f"{self.trainer}'s default of {name}" for name in names if name not in self.asked]
        self.settings[setting] = value, "; ".join([*given, *missing][: len(given) or 1] + [why] * bool(why))

    def lack(self, name: str, reason: str) -> None:
        """List a given option as one without counterpart."""
        self.read.add(name)
        if name in self.asked:
            self.missing[self.label(name)] = reason

    def label(self, name: str) -> str:
        value = self.asked.get(name, "")
        return name if value == "True" else f"{name} {mask_secrets(name, value)}"


def draft_of(trainer: str, tables: Sequence[str], given: Iterable[tuple[str, str]]) -> Draft:
    """Return the draft with every option that needs no other one; `finish` lists what nothing has used."""
    draft = Draft(trainer, options_of(*tables))
    for name, value in given:
        option = option_named(name, draft.options)
        if option is None:
            is_named_secret = re.search(r"key|token|secret|password", name, re.I) is not None and value != "True"
            draft.unknown.append(f"{name} {'***' if is_named_secret else mask_secrets(name, value)}")
            continue
        if option.is_setting and option.conversion != "given" and is_variable(value):
            draft.missing[f"{name} {mask_secrets(name, value)}"] = (
                f"The script does not say its value: set {option.setting}"
            )
            continue
        usual = option.name if option.is_setting and not option.name.endswith("*") else name
        before = draft.asked.get(usual, "null")
        if value in NOT_SAID and before not in NOT_SAID:  # a file may have all names of an option
            continue
        if option.setting != ALWAYS and before not in (*NOT_SAID, value):
            again = f"It is given twice, and the last value counts: {mask_secrets(usual, value)}"
            draft.always[draft.label(usual)] = again
        draft.asked[usual] = value
    for usual, value in draft.asked.items():
        _place(draft, usual, option_named(usual, draft.options), value)
    for name, option in draft.options.items():
        is_plain = name == option.name and option.is_setting and option.conversion != JOINT
        if is_plain and option.default and option.setting not in draft.settings:
            if option.default == "null":
                draft.put(option.setting, None, name)
            else:
                _convert(draft, name, option, option.default)
    return draft


def finish(draft: Draft) -> None:
    """List options that no conversion has used and what a run lacks, and keep filters of tokens out of training."""
    for setting in ("policy.model", "data.train"):
        if setting not in draft.settings and not any(why.endswith(f"set {setting}") for why in draft.missing.values()):
            draft.missing[setting] = f"The command does not say it: set {setting}"
    filters = {"sampling.top_p": 1, "sampling.top_k": 0, "sampling.min_p": 0}
    if any(draft.settings.get(name, (off, ""))[0] not in (off, -1) for name, off in filters.items()):
        draft.put("sampling.only_eval", True, why="training samples from the policy's own distribution")
    has_adapter = draft.settings.get("policy.lora.rank", (1, ""))[0] != 0
    alpha = draft.settings.get("policy.lora.alpha", (None, ""))[1]
    if alpha.startswith(f"{draft.trainer}'s default") and "policy.lora.rank" not in draft.settings:
        draft.settings.pop("policy.lora.alpha")
    for usual, value in draft.asked.items():
        option = draft.options.get(usual)
        if option and not has_adapter and option.setting in ("policy.lora.alpha", "policy.lora.targets"):
            draft.settings.pop(option.setting, None)
            draft.always[draft.label(usual)] = "There is no adapter: its rank is 0"
            draft.read.add(usual)
        if option and option.conversion == JOINT and usual not in draft.read:
            if value in NOT_SAID:
                draft.always[draft.label(usual)] = "No value: the setting's default"
            else:
                draft.missing[draft.label(usual)] = f"Nearest: {option.setting}"


def value_of(text: str) -> Any:
    """Return a text as number, truth value, list or text.

    Example: "1e-6" -> 1e-06; "0.9 0.95" -> [0.9, 0.95]; "True" -> True
    """
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text.replace("_", "") if kind is int else text)
        except ValueError:
            continue
    parts = re.split(r"[,\s]+", text.strip("[]()"))
    if len(parts) > 1 and all(re.fullmatch(r"[-+]?[\d.]+(e-?\d+)?", part) for part in parts):
        return [value_of(part) for part in parts]
    return text


def texts_of(text: str) -> list[str]:
    """Return the texts of a list: [a,b], ['a', 'b'], a,b or a."""
    parts = re.split(r",\s*|\s+", text.strip().strip("[]()").replace('"', "").replace("'", ""))
    return [part for part in parts if part]


def map_of(text: str) -> dict[str, Any] | None:
    """Return the map of a text in JSON or Python's form; None for another text."""
    try:
        found = ast.literal_eval(re.sub(r"\b(true|false)\b", lambda match: match[0].title(), text) or "{}")
    except (ValueError, SyntaxError):
        return None
    return found if isinstance(found, dict) else None


def is_variable(text: str) -> bool:
    """Return whether a value needs a running shell or Hydra."""
    return re.search(r"\$[\w({]|`|\?\?\?", text) is not None


def _place(draft: Draft, name: str, option: Option | None, value: str) -> None:
    """Convert one option, or list it."""
    if option is None or option.conversion == JOINT:
        return
    same = [each.lower() for each in option.default.split(",")]
    if option.setting == ALWAYS:
        draft.always[draft.label(name)] = option.conversion
    elif option.setting == MISSING and (str(value).lower() in same or value in NOT_SAID):
        draft.always[draft.label(name)] = "It means the same as leaving it out"
    elif option.setting == MISSING:
        draft.missing[draft.label(name)] = option.conversion
    elif value in NOT_SAID:
        draft.always[draft.label(name)] = "No value: the setting's default"
    else:
        _convert(draft, name, option, value)


def _convert(draft: Draft, name: str, option: Option, value: str) -> None:
    """Write an option's setting. name: the option's usual name, or its whole name below a "part.*"."""
    kind, _, key = option.conversion.partition(":")
    converted: Any = value_of(value)
    why = ""
    if kind in _WORDS:
        converted = _WORDS[kind].get(value.replace("true", "True").replace("false", "False"))
    elif kind == "engine":
        _put_engine_argument(draft, name, option, key or name.removeprefix(option.name[:-1]), converted)
        return
    elif kind == "never":
        converted = max(0, converted) if isinstance(converted, int) else converted
    elif kind == "at_least_2" and isinstance(converted, int | float) and converted < 2:
        converted, why = 2, "two are the least"
    elif kind == "name":
        converted = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")[:180]
    elif kind == "targets":
        converted = [] if value in ("all-linear", "all_linear") else texts_of(value)
    elif kind == "largest":
        converted = max(map(abs, converted)) if isinstance(converted, list) else converted
    elif kind == "positive" and (not isinstance(converted, int | float) or converted <= 0):
        draft.always[draft.label(name)] = "Not above 0: the setting's default"
        return
    elif kind == "map":
        converted = map_of(value)
    elif kind == "text":
        converted = value
    elif kind == "given":
        converted, why = True, "in the run folder"
    elif kind not in ("", "positive", "at_least_2"):
        raise KeyError(kind)
    if converted is None:
        draft.missing[f"{name} {mask_secrets(name, value)}"] = f"{option.setting} has no such value"
    else:
        draft.put(option.setting, converted, name, why=why)


def _put_engine_argument(draft: Draft, name: str, option: Option, key: str, value: Any) -> None:
    """Add one argument of vLLM to rollout.engine_args; "config.mode" is below config."""
    arguments, comment = draft.settings.get(option.setting, ({}, ""))
    *parents, last = key.split(".")
    below = arguments
    for parent in parents:
        below = below.setdefault(parent, {})
    below[last] = value
    draft.settings[option.setting] = arguments, "; ".join(filter(None, [comment, draft.label(name)]))


def mask_secrets(name: str, value: str) -> str:
    """Return an option's value as it may be written: without keys, tokens, and passwords of URLs."""
    if _NAME_OF_SECRET.search(name) and value != "True":
        return "***"
    return _SECRET.sub("***", _PASSWORD.sub("//***@", value))
