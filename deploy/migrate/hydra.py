"""Overrides of Hydra and its configuration files, as verl's commands have them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_BUILT_IN = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "")
_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?(?P<name>[A-Za-z_][\w.]*)(?:,(?P<default>[^{}]*))?\}")
_OVERRIDE = re.compile(r"(?:\+{0,2}(?P<name>[A-Za-z_][\w.]*)=(?P<value>.*)|~(?P<gone>[\w.]+)(=.*)?)", re.S)


def overrides_in(words: Sequence[str], folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return Hydra's overrides over the values of its configuration file, and what cannot be read with the reason.

    folder: the script's; the configuration is looked for there and in the folders above.
    """
    named = dict(re.findall(r"--config-(path|name)[ =](\S+)", " ".join(words)))
    name = named.get("name", "").removesuffix(".yaml").strip("'\"")
    lost = {word: "Only a running shell knows these words" for word in words if re.fullmatch(r"\$\{?\w+\}?", word)}
    values: dict[str, str] = {}
    if name not in _BUILT_IN:
        parts = Path(named.get("path", "config").strip("'\"")).parts
        tails = [Path(*parts[start:]) / f"{name}.yaml" for start in range(len(parts) + 1)]
        files = [up / tail for up in (folder, *folder.parents) for tail in tails if not tail.is_absolute()]
        if file := next((file for file in files if file.is_file()), None):
            values = flat_names(yaml.safe_load(file.read_text(encoding="utf-8")))
        else:
            lost[f"--config-name {name}"] = "The file is not beside the script: give its values as overrides"
    for match in filter(None, map(_OVERRIDE.fullmatch, words)):
        value = (match["value"] or "").strip() if match["name"] else "null"
        bare = value.strip("'\"") if value[:1] in ("'", '"') else value
        values[_without_section(match["name"] or match["gone"])] = bare
    return resolve_names(values), lost


def resolve_names(values: Mapping[str, str]) -> dict[str, str]:
    """Return values with ${name} and ${oc.select:name,default} replaced by what they stand for, where it is known."""

    def value_of(match: re.Match[str]) -> str:
        name = _without_section(match["name"])
        return values.get(name, match[0] if match["default"] is None else match["default"].strip())

    found = dict(values)
    for _ in range(4):  # one may stand for another
        found = {name: _INTERPOLATION.sub(value_of, value) for name, value in found.items()}
    return found


def flat_names(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Return the leaves of maps in maps by dotted name, without what only Hydra reads."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value and (above or name != "hydra"):
            found |= flat_names(value, f"{above}{name}.")
        elif name != "_target_" and (above or name not in ("defaults", "hydra")):
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            found[_without_section(f"{above}{name}")] = "null" if value in (None, {}) else text
    return found


def _without_section(name: str) -> str:
    return name.removeprefix("actor_rollout_ref.")
