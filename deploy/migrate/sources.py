"""Commands of other trainers in scripts and files: their options, and what converts them."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from deploy.migrate import openrlhf, verl
from deploy.migrate.convert import Draft
from deploy.migrate.hydra import flat_names, overrides_in
from deploy.migrate.shell import words_after
from protocol.errors import SettingsError

Options = list[tuple[str, str]]  # (name, value), in the order of the command
KNOWN = ("openrlhf.cli.train_ppo_ray", "verl.trainer.main_ppo", "verl.trainer.sft_trainer")


@dataclass(frozen=True)
class Form:
    trainer: str
    tables: tuple[str, ...]  # the first one that has a name decides
    convert: Callable[[Draft], None]


@dataclass(frozen=True)
class Command:
    name: str
    form: Form
    options: Options
    lost: dict[str, str] = field(default_factory=dict)  # parts of the command that cannot be read, with the reason


def _openrlhf_rows(objective: str, **defaults: Any) -> Form:
    convert = partial(openrlhf.convert_rows, objective=objective, **defaults)
    return Form("OpenRLHF", ("openrlhf_rows", "openrlhf"), convert)


_OPENRLHF = {
    "train_ppo": Form("OpenRLHF", ("openrlhf_rl", "openrlhf"), openrlhf.convert_rl),
    "train_sft": _openrlhf_rows("sft", lr=5e-6, epochs=2, length=2048),
    "train_dpo": _openrlhf_rows("dpo", lr=1e-5, epochs=1, length=512),
    "train_kto": _openrlhf_rows("kto", lr=1e-6, epochs=1, length=512),
    "train_kd": _openrlhf_rows("distill", lr=5e-6, epochs=2, length=2048),
    "train_rm": _openrlhf_rows("reward_model", lr=9e-6, epochs=1, length=512),
}
_VERL = Form("verl", ("verl",), verl.convert_rl)
_SEARCH_R1 = Form("Search-R1", ("search_r1", "verl"), verl.convert_search_r1)
_VERL_ROWS = Form("verl", ("verl_rows", "verl"), verl.convert_rows)
_OF_SEARCH_R1 = {"rollout.n_agent", "max_turns", "data.max_start_length", "retriever.url", "actor.state_masking"}
_LAUNCHER = re.compile(
    r"openrlhf\.cli\.(?P<openrlhf>train_\w+)"
    r"|(?:verl|recipe)\.(?:\w+\.)*(?P<verl>main_ppo\w*|main_dapo|async_main_ppo|fully_async_main|\w*sft_trainer\w*)"
)
_PROCESSES = re.compile(r"--(nproc[_-]per[_-]node|num_processes|num_gpus|nnodes|num_nodes|num_machines)[ =]+(\d+)")


def commands_of(path: Path) -> list[Command]:
    """Return the training commands of a file that are known here."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml", ".json"):
        return [_of_values(path, json.loads(text) if path.suffix == ".json" else yaml.safe_load(text))]
    found = (_of_words(match, before, words, path) for match, before, words in words_after(text, _LAUNCHER))
    return [command for command in found if command]


def options_in(words: Sequence[str]) -> Options:
    """Return (name, value) of each --name value; a name without value is True, several values are joined."""
    found: Options = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name, value if equals else "True"))
        elif found:
            name, value = found[-1]
            found[-1] = (name, word if value == "True" else f"{value} {word}")
    return found


def _of_words(match: re.Match[str], before: str, words: list[str], path: Path) -> Command | None:
    if name := match["openrlhf"]:
        form = _OPENRLHF.get(name.removesuffix("_ray"))
        launched = [] if form is _OPENRLHF["train_ppo"] else _processes(before)
        return Command(name, form, launched + options_in(words)) if form else None
    values, lost = overrides_in(words, path.parent)
    if "sft" in match["verl"]:
        return Command(match["verl"], _VERL_ROWS, _processes(before) + list(values.items()), lost)
    return Command(match["verl"], _form_of_rl(values), list(values.items()), lost)


def _of_values(path: Path, values: Any) -> Command:
    if isinstance(values, Mapping) and "actor_rollout_ref" in values:
        found = flat_names(values)
        return Command(path.name, _form_of_rl(found), list(found.items()))
    if isinstance(values, Mapping) and {"data", "trainer", "model"} <= set(values):
        return Command(path.name, _VERL_ROWS, list(flat_names(values).items()))
    raise SettingsError(f"migrate: {path} is not a configuration of verl: it has no section actor_rollout_ref.")


def _form_of_rl(names: Iterable[str]) -> Form:
    return _SEARCH_R1 if _OF_SEARCH_R1 & set(names) else _VERL


def _processes(launcher: str) -> Options:
    """Return a launcher's numbers of processes and machines."""
    machines = ("nnodes", "num_nodes", "num_machines")
    found = _PROCESSES.findall(launcher)
    return [("num_machines" if name in machines else "num_processes", value) for name, value in found]
