"""Commands of other trainers in scripts and files: their options, and what converts them."""

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from deploy.migrate import openrlhf, trl, verl
from deploy.migrate.convert import Draft
from deploy.migrate.hydra import configuration_in, overrides_in, resolve_names, tree_in
from deploy.migrate.python_calls import configurations_in
from deploy.migrate.shell import words_after
from protocol.errors import SettingsError
from protocol.settings.elsewhere import Option, options_of

Options = list[tuple[str, str]]  # (name, value), in the order of the command
KNOWN = ("openrlhf.cli.train_ppo_ray", "verl.trainer.main_ppo", "trl grpo", "GRPOConfig(..)")


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
    "train_kd": _openrlhf_rows("distill", lr=5e-6, epochs=1, length=2048),
    "train_rm": _openrlhf_rows("reward_model", lr=9e-6, epochs=1, length=512),
}
_VERL = Form("verl", ("verl",), verl.convert_rl)
_SEARCH_R1 = Form("Search-R1", ("search_r1", "verl"), verl.convert_search_r1)
_VERL_ROWS = Form("verl", ("verl_rows", "verl"), verl.convert_rows)


def _trl_rows(objective: str, lr: float, loss: str = "sigmoid") -> Form:
    return Form("TRL", ("trl_rows", "trl"), partial(trl.convert_rows, objective=objective, lr=lr, loss=loss))


_GRPO = Form("TRL", ("trl_rl", "trl"), trl.convert_rl)
TRL = {
    "grpo": _GRPO,
    "gspo": _GRPO,
    "async_grpo": Form("TRL", ("trl_async", "trl_rl", "trl"), partial(trl.convert_rl, is_asynchronous=True)),
    "rloo": Form("TRL", ("trl_rl", "trl"), partial(trl.convert_rl, is_rloo=True)),
    "sft": _trl_rows("sft", 2e-5),
    "dpo": _trl_rows("dpo", 1e-6),
    "orpo": _trl_rows("dpo", 1e-6, loss="orpo"),
    "cpo": _trl_rows("dpo", 1e-6, loss="cpo"),
    "kto": _trl_rows("kto", 1e-6, loss="kto"),
    "reward": _trl_rows("reward_model", 1e-4),
}
_OF_SEARCH_R1 = {"rollout.n_agent", "max_turns", "data.max_start_length", "retriever.url", "actor.state_masking"}
_LAUNCHER = re.compile(
    r"openrlhf\.cli\.(?P<openrlhf>train_\w+)"
    r"|(?:verl|recipe)\.(?:\w+\.)*(?P<verl>main_ppo\w*|main_dapo|async_main_ppo|fully_async_main|\w*sft_trainer\w*)"
    r"|\btrl\s+(?P<trl>sft|dpo|kto|grpo|rloo|reward)\b|-m\s+trl\.scripts\.(?P<module>\w+)"
    r"|(?:accelerate\s+launch|python3?|torchrun|uv\s+run)\b(?!.*\s-m\s)[^|;&]*?[\s/](?P<script>\w+)\.py\b"
)
_PROCESSES = re.compile(
    r"--(nproc[_-]per[_-]node|num[_-]processes|num_gpus|nnodes|num_nodes|num[_-]machines)[ =]+[\"']?([^\s\"']+)"
)
_SEVERAL_WORDS = re.compile(  # of which no option takes one as its value
    r"\$\{\w+(?:\[[@*]\]|\+=\.\.)\}|\$\{?\w*(?:args|opts|options|flags|extra|params)\w*\}?", re.I
)


def commands_of(path: Path, trainer: str | None = None) -> list[Command]:
    """Return the training commands of a file that are known here. trainer: TRL's, for a file of values alone."""
    if path.suffix in (".yaml", ".yml", ".json"):
        return [_of_values(path, tree_in(path), trainer)]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        known = {f"{name.replace('_', '')}config": form for name, form in TRL.items()}
        calls = configurations_in(text, path.name, known)
        if calls:
            return [Command(name, known[name.lower()], list(options.items())) for name, options in calls]
        text = ast.get_docstring(ast.parse(text)) or ""
    found = []
    for match, before, words, is_cut in words_after(text, _LAUNCHER):
        if command := _of_words(match, before, words, path):
            if is_cut:
                command.lost["remark in the command"] = "A shell ends the command there; here all of it is converted"
            found.append(command)
    return found


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
        words, lost = _drop_lists(words)
        return Command(name, form, launched + options_in(words), lost) if form else None
    if not match["verl"]:
        return _of_trl(match, before, words, path)
    values, lost = overrides_in(words, path.parent, match[0])
    if "sft" in match["verl"]:
        return Command(match["verl"], _VERL_ROWS, _processes(before) + list(values.items()), lost)
    return Command(match["verl"], _form_of_rl(values), list(values.items()), lost)


def _of_trl(match: re.Match[str], before: str, words: list[str], path: Path) -> Command | None:
    name = match["trl"] or match["module"] or match["script"]
    kinds = [kind for kind in TRL if name == kind or name.startswith(f"{kind}_")]
    if not kinds or re.search("online|diffusion", name):
        return None
    form = TRL[max(kinds, key=len)]
    words, lost = _drop_lists(words)
    given = _fields(options_in(words), options_of(*form.tables))
    launcher = f"{before} {match[0]}"
    found = dict(re.findall(r"--(config_file)[ =](\S+)", launcher))
    if file := _beside(path, found.get("config_file", "")):
        values = tree_in(file)
        found |= {name: str(values[name]) for name in ("num_machines", "num_processes") if name in values}
    found |= dict(_processes(launcher))
    lost |= {"pictures": "Pictures are not there"} if "vlm" in name else {}
    if match["script"] and name not in TRL:
        lost[f"{name}.py"] = "What the program itself sets is not read: compare it"
    if name_of_values := given.pop("config", ""):
        if file := _beside(path, name_of_values):
            found |= _flat_values(tree_in(file))
        else:
            lost[f"--config {name_of_values}"] = "The file is not beside the script"
    return Command(name, form, list((found | given).items()), lost)


def _drop_lists(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return words without those that stand for several, which are returned with the reason."""
    lost = {word: "Only a running shell knows these words" for word in words if _SEVERAL_WORDS.fullmatch(word)}
    return [word for word in words if word not in lost], lost


def _fields(given: Options, known: Mapping[str, Option]) -> dict[str, str]:
    """Return options as transformers' parser names them: --no_bf16 or --no-bf16 is bf16 False."""
    found: dict[str, str] = {}
    for written, value in given:
        name = written.replace("-", "_")
        is_negated = name not in known and name.removeprefix("no_") in known
        found[name.removeprefix("no_") if is_negated else name] = "False" if is_negated else value
    return found


def _beside(path: Path, name: str) -> Path | None:
    """Return a file that a script names, from its own folder or one above."""
    files = (folder / name for folder in path.resolve().parents)
    return next((file for file in files if name and file.is_file()), None)


def _flat_values(values: dict[str, Any]) -> dict[str, str]:
    """Return the values of a file as TRL's command line has them."""
    shown = values | ({"env": list(values["env"])} if isinstance(values.get("env"), dict) else {})  # it may hold keys
    return {
        str(name): "null" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in shown.items()
    }


def _of_values(path: Path, values: dict[str, Any], trainer: str | None) -> Command:
    if trainer:
        return Command(path.name, TRL[trainer], list(_flat_values(values).items()))
    if "actor_rollout_ref" in values or {"data", "trainer", "model"} <= set(values):
        given, lost = configuration_in(values, path.parent)
        found = resolve_names(given)
        form = _form_of_rl(found) if "actor_rollout_ref" in values else _VERL_ROWS
        return Command(path.name, form, list(found.items()), lost)
    raise SettingsError(
        f"migrate: {path} is not a configuration of verl: it has no section actor_rollout_ref. For one of TRL, name "
        f"the trainer: --trainer {', '.join(TRL)}."
    )


def _form_of_rl(names: Iterable[str]) -> Form:
    return _SEARCH_R1 if _OF_SEARCH_R1 & set(names) else _VERL


def _processes(launcher: str) -> Options:
    """Return a launcher's numbers of machines, and of processes on all of them."""
    said = {name.replace("-", "_"): value for name, value in _PROCESSES.findall(launcher)}
    if unsaid := [value for value in said.values() if not value.isdecimal()]:
        return [("num_processes", unsaid[0])]
    given = {name: int(value) for name, value in said.items()}
    machines = next((given[name] for name in ("nnodes", "num_nodes", "num_machines") if name in given), None)
    of_each = given.get("nproc_per_node", given.get("num_gpus"))
    processes = given.get("num_processes", of_each * (machines or 1) if of_each else None)
    found = {"num_machines": machines, "num_processes": processes}
    return [(name, str(value)) for name, value in found.items() if value is not None]
