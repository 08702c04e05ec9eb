"""`sluice migrate`: another trainer's command becomes a settings file, and an adapter a whole model.

Exit status: 0; 1 when options have no counterpart or are unknown, after the file is written; 2 for a file without a
command that it can read.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.migrate.convert import Draft, draft_of, finish
from deploy.migrate.sources import KNOWN, TRL, commands_of
from protocol.disk.files import replace_file
from protocol.errors import SettingsError
from protocol.settings.loader import describe_settings, validate_settings
from protocol.settings.settings import Settings

CONFIG = "adapter_config.json"
_NO_EFFECT = re.compile(r"settings: ([\w.]+) = .* has no effect: (.*)", re.S)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="sluice migrate", description="Convert another trainer's command. It is read, never run."
    )
    parser.add_argument(
        "file", type=Path, help=f"folder of an adapter, or script or configuration with {', '.join(KNOWN)}"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="settings file to write (default: the terminal), or folder for a model",
    )
    parser.add_argument(
        "--accept", nargs="+", default=[], metavar="NAME", help="options whose loss you accept; all: every one"
    )
    parser.add_argument("--trainer", choices=TRL, metavar="NAME", help="TRL's trainer, for a file of its values alone")
    given = parser.parse_args(arguments)
    if given.file.is_dir():
        return _merge(given.file, given.output)
    try:
        draft, source = read(given.file, given.trainer)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "It is not text"
        raise SettingsError(f"migrate: {given.file} cannot be read: {reason}. Give an existing file.") from None
    problem = check(draft)
    text = settings_file(draft, source, problem)
    if given.output:
        replace_file(given.output, text.encode())
    else:
        print(text, end="")
    lost = [name for name in [*draft.missing, *draft.unknown] if not {name.split()[0], "all"} & set(given.accept)]
    print(
        f"migrate: {len(draft.settings)} settings, {len(draft.always)} options always so or without effect, "
        f"{len(draft.missing)} without a counterpart, {len(draft.unknown)} unknown.",
        *[f"Still wrong: {problem}"] * bool(problem),
        *[f"Not converted: {', '.join(lost)}. Read the file's end, and accept each with --accept NAME."] * bool(lost),
        file=sys.stderr,
    )
    return 1 if lost or problem else 0


def _merge(folder: Path, output: Path | None) -> int:
    """Merge an adapter's folder into its base; returns the exit status."""
    if output is None or not (folder / CONFIG).is_file():
        raise SettingsError(f"migrate: {folder} is a folder. Give one with {CONFIG}, and --output MODEL.")
    print(f"migrate: {merge_adapter(folder, output)} with {folder} merged into it is {output}.", file=sys.stderr)
    return 0


def read(path: Path, trainer: str | None = None) -> tuple[Draft, str]:
    """Return a file's first command as a draft, and its name.

    Raises: SettingsError when the file has no command of a known trainer, or text where an option takes a number.
    """
    commands = commands_of(path, trainer)
    if not commands:
        raise SettingsError(
            f"migrate: {path} has no command that is known here. Give a script with {'; '.join(KNOWN)}."
        )
    first, *others = commands
    draft = draft_of(first.form.trainer, first.form.tables, first.options)
    try:
        first.form.convert(draft)
    except ValueError as error:  # of float: it names the text
        raise SettingsError(f"migrate: {path}: an option of {first.name} takes numbers: {error}.") from None
    finish(draft)
    draft.missing |= first.lost
    for other in others:
        draft.missing[other.name] = "One command is converted: give this one a file of its own"
    return draft, first.name


def merge_adapter(adapter: Path, output: Path) -> str:
    """Write the base model with an adapter that PEFT wrote merged into it to `output`; returns the base's name.

    TRL's output folder and verl's lora_adapter are such. The weights keep the base's type.
    The tokenizer is the adapter folder's, if it has one.
    Raises: SettingsError when `output` exists, or the adapter or its base cannot be read, or do not fit each other.
    """
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if output.exists():
        raise SettingsError(f"migrate: {output} exists. Give --output a new folder.")
    try:
        base = str(json.loads((adapter / CONFIG).read_bytes())["base_model_name_or_path"] or "")
        whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        tensors = load_peft_weights(str(adapter), "cpu")
        _fit_embeddings(whole, tensors)
        model = PeftModel.from_pretrained(whole, str(adapter))
        read: Any = set_peft_model_state_dict(model, tensors)
        has_tokenizer = any(path.name.startswith("tokenizer") for path in adapter.iterdir())
        tokenizer = AutoTokenizer.from_pretrained(str(adapter) if has_tokenizer else base)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise SettingsError(
            f"migrate: {adapter} cannot be merged into its base ({type(error).__name__}: {str(error)[:300]}). Set "
            f"base_model_name_or_path in its {CONFIG} to a model in reach."
        ) from None
    # PEFT leaves out what does not fit: the result would be the base, or a reward model without its head.
    unused, missing = read.unexpected_keys, [name for name in read.missing_keys if ".lora_" in name]
    if unused or missing:
        raise SettingsError(
            f"migrate: {adapter} does not fit its base {base}: {len(unused)} tensors have no place there and "
            f"{len(missing)} are missing, such as {[*unused, *missing][0]}. Merge it with the program that trained it."
        )
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.merge_and_unload().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.replace(partial, output)
    return base


def _fit_embeddings(model: Any, tensors: Mapping[str, Any]) -> None:
    """Give embedding and head the rows that an adapter has, and weights of their own where it changes one of the two.

    Tied, the merged change of one would be the other's, too.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = [f"base_model.model.{name}." for name, module in model.named_modules() if module in (embedding, head)]
    changed = {name: tensor for name, tensor in tensors.items() if name.startswith(tuple(names))}
    rows = {len(tensor) for name, tensor in changed.items() if name.endswith(".weight") and ".lora_" not in name}
    if rows - {len(embedding.weight)}:
        model.resize_token_embeddings(max(rows), mean_resizing=False)
    if any(".lora_" in name for name in changed) and head.weight is embedding.weight:
        head.weight = type(head.weight)(head.weight.detach().clone())
        model.config.tie_word_embeddings = False


def check(draft: Draft) -> str:
    """Move settings without effect to a list; return the sentence about what is still wrong, "" for nothing."""
    for _ in range(len(draft.settings) + 1):
        try:
            validate_settings(as_tree({name: value for name, (value, _) in draft.settings.items()}))
        except SettingsError as error:
            match = _NO_EFFECT.match(str(error))
            if match is None or match[1] not in draft.settings:
                return str(error)
            _, comment = draft.settings.pop(match[1])
            if not comment.startswith(f"{draft.trainer}'s default"):
                draft.always[comment or match[1]] = f"{match[1]} has no effect: {match[2].partition('. ')[0]}"
        else:
            break
    return ""


def settings_file(draft: Draft, source: str, problem: str) -> str:
    """Return the text of the file. source: the command's name; problem: the sentence of `check`."""
    head = [f"From {draft.trainer} ({source}) by sluice migrate. Each line names the option that it comes from."]
    lists = {
        "Before the run": draft.steps,
        "Still wrong": [problem] if problem else [],
        "Unknown to sluice migrate": draft.unknown,
        "Without a counterpart": [f"{name}: {reason}" for name, reason in draft.missing.items()],
        "Always so here, or without effect": [f"{name}: {reason}" for name, reason in draft.always.items()],
    }
    lines = [f"# {line}" for line in head]
    lines += _lines(as_tree(draft.settings), 0)
    for title, entries in lists.items():
        if entries:
            lines += ["", f"# {title}:", *(f"#   {' '.join(entry.split())}" for entry in entries)]
    return "\n".join(lines) + "\n"


def as_tree(settings: dict[str, Any]) -> dict[str, Any]:
    """Return dotted names as maps in maps, in the order of docs/look_up/settings.md."""
    order = {name: place for place, (name, _, _) in enumerate(describe_settings(Settings()))}
    tree: dict[str, Any] = {}
    for name in sorted(settings, key=order.__getitem__):
        *parents, last = name.split(".")
        below = tree
        for parent in parents:
            below = below.setdefault(parent, {})
        below[last] = settings[name]
    return tree


def _lines(tree: dict[str, Any], depth: int) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield f"{'  ' * depth}{name}:"
            yield from _lines(value, depth + 1)
        else:
            written, comment = value
            text = yaml.safe_dump(written, default_flow_style=True, width=10**6, sort_keys=False).removesuffix(
                "\n...\n"
            )
            yield f"{'  ' * depth}{name}: {text.strip()}{'  # ' * bool(comment)}{' '.join(comment.split())}"
