"""Overrides of Hydra and its configuration files, as verl's commands have them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from protocol.errors import SettingsError

_OWN_GPUS = {"rollout.nnodes": "1", "rollout.n_gpus_per_node": "8"}
_FULLY_ASYNC = _OWN_GPUS | {
    "async_training.staleness_threshold": "0.1",
    "async_training.trigger_parameter_sync_step": "4",
    "async_training.require_batches": "1",
    "rollout.total_rollout_steps": "100",
    "rollout.total_epochs": "10",
    "rollout.test_freq": "1",
}
_ONE_STEP_OFF = _OWN_GPUS | {"hybrid_engine": "False", "algorithm.rollout_correction.bypass_mode": "True"}
_ENGINE = {  # of fine-tuning, where it differs from verl_rows.table, which is the older trainer's
    "optim.lr": "1e-3",
    "optim.betas": "0.9,0.999",
    "optim.lr_warmup_steps_ratio": "0.0",
    "optim.lr_scheduler_type": "constant",
}
_BUILT_IN: dict[str, dict[str, str]] = {  # verl's configurations, with what differs from verl.table
    **{name: {} for name in ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "")},
    "sft_trainer_engine": _ENGINE,
    **dict.fromkeys(("fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer"), _FULLY_ASYNC),
    **dict.fromkeys(("one_step_off_ppo_trainer", "one_step_off_ppo_megatron_trainer"), _ONE_STEP_OFF),
}
_OF_MODULE = {"fully_async": "fully_async_ppo_trainer", "one_step_off": "one_step_off_ppo_trainer"}
_OF_MODULE[".sft_trainer"] = "sft_trainer_engine"
_OWN_PART = re.compile(  # of the list of defaults in a copy of verl's configuration
    r"((\$\{model_engine\}|dp|megatron|veomni|torchtitan)_)?(actor|ref|critic|reward_(model|loop))"
    r"|legacy_(data|reward_impl)|reward(_manager|_model)?|rollout(_correction)?|hf_model|distillation|transfer_queue"
    r"|dp|fsdp2?|megatron|veomni|torchtitan|(npu_)?profiler?"
)
_INTERPOLATION = re.compile(r"\$\{(?:oc\.(?:select|env):)?(?P<name>[A-Za-z_][\w.]*)(?:,(?P<default>[^{}]*))?\}")
_OVERRIDE = re.compile(r"(?:\+{0,2}(?P<name>[A-Za-z_][\w.]*)=(?P<value>.*)|~(?P<gone>[\w.]+)(=.*)?)", re.S)


def overrides_in(words: Sequence[str], folder: Path, module: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return Hydra's overrides over the values of its configuration file, and what cannot be read with the reason.

    folder: the script's; the configuration is looked for there and in the folders above. module: the program's.
    """
    named = dict(re.findall(r"(?:--config-|-c)(path|name|p|n)[ =](\S+)", " ".join(words)))
    name = (named.get("name") or named.get("n", "")).strip("'\"").removesuffix(".yaml")
    parts = Path((named.get("path") or named.get("p", "config")).strip("'\"")).parts
    tails = [Path(*parts[start:]) / f"{name}.yaml" for start in range(len(parts) + 1)]
    files = [up / tail for up in (folder, *folder.parents) for tail in tails if name and not tail.is_absolute()]
    lost: dict[str, str] = {}
    if file := next((file for file in files if file.is_file()), None):
        values, lost = configuration_in(tree_in(file), file.parent)
    else:
        own = name or next((own for part, own in _OF_MODULE.items() if part in module), "")
        values = dict(_BUILT_IN.get(own, {}))
        if own not in _BUILT_IN:
            lost[f"--config-name {name}"] = "The file is not beside the script: give its values as overrides"
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if match is None or word.startswith("rollout.n="):
            if word and not word.startswith("-") and word not in named.values():
                lost[word] = "Only a running shell knows these words" if "$" in word else "It sets no option of verl"
            continue
        value = (match["value"] or "").strip() if match["name"] else "null"
        bare = value.strip("'\"") if value[:1] in ("'", '"') else value
        values[_without_section(match["name"] or match["gone"])] = bare
    return resolve_names(values), lost


def configuration_in(
    tree: dict[str, Any], folder: Path, above: tuple[Path, ...] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the values of a configuration and of its list of defaults, and the entries of the list without a file.

    above: files whose lists lead here.
    """
    values: dict[str, str] = {}
    lost: dict[str, str] = {}
    listed = tree.pop("defaults", None) or []
    for group, option in _entries(listed if "_self_" in listed else [*listed, "_self_"]):
        if option == "_self_":
            values |= flat_names(tree)
        elif option in _BUILT_IN or group == "optim@optim":
            values |= _BUILT_IN.get(option, _ENGINE)
        elif not re.match(r"override |/?hydra", group):
            group, _, package = group.strip("/").partition("@")
            file = folder / group / f"{option}.yaml"
            if _OWN_PART.fullmatch(option.partition("@")[0]) and (group or not file.is_file()):
                continue
            if not file.is_file() or file in above:
                lost[f"defaults: {group or option}"] = "The file is not beside the configuration: give its values in it"
                continue
            below, not_found = configuration_in(tree_in(file), folder, (*above, file))
            is_global = "@package _global_" in file.read_text(encoding="utf-8")
            section = "" if is_global else package or group.replace("/", ".")
            values |= {_without_section(f"{section}.{name}".strip(".")): value for name, value in below.items()}
            lost |= not_found
    return values, lost


def _entries(listed: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield group and option of each entry of a list of defaults. An entry may have several options, or none."""
    for entry in listed:
        for group, options in entry.items() if isinstance(entry, dict) else [("", entry)]:
            for option in options if isinstance(options, list) else [options]:
                if option is not None:
                    yield str(group), str(option)


def tree_in(path: Path) -> dict[str, Any]:
    """Return what a YAML or JSON file holds; an empty file holds nothing.

    Raises: SettingsError for other text.
    """
    text = path.read_text(encoding="utf-8")
    try:
        tree = (json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)) or {}
        if not isinstance(tree, dict):
            raise ValueError("it does not name its values")
        return tree
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SettingsError(f"migrate: {path} cannot be read: {reason}. Give one document of YAML or JSON.") from None


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
        elif name != "_target_" and (above or name not in ("defaults", "hydra")) and f"{above}{name}" != "rollout.n":
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            found[_without_section(f"{above}{name}")] = "null" if value in (None, {}) else text
    return found


def _without_section(name: str) -> str:
    return name.removeprefix("actor_rollout_ref.")
