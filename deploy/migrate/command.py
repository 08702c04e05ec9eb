"""`sluice migrate`: another trainer's command becomes a settings file, and an adapter a whole model.

Exit status: 0; 1 when options have no counterpart or are unknown, after the file is written; 2 for a file without a
command that it can read.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.migrate.convert import Draft, draft_of, finish
from deploy.migrate.sources import KNOWN, TRL, commands_of
from deploy.migrate.write import check, settings_file
from protocol.disk.files import replace_file
from protocol.errors import SettingsError

CONFIG = "adapter_config.json"


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
    except OSError as error:
        raise SettingsError(f"migrate: {given.file} cannot be read: {error.strerror}. Give an existing file.") from None
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
    Raises: SettingsError when `output` exists, or the adapter or its base cannot be read.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if output.exists():
        raise SettingsError(f"migrate: {output} exists. Give --output a new folder.")
    try:
        base = str(json.loads((adapter / CONFIG).read_bytes())["base_model_name_or_path"] or "")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), str(adapter))
        has_tokenizer = any(path.name.startswith("tokenizer") for path in adapter.iterdir())
        tokenizer = AutoTokenizer.from_pretrained(str(adapter) if has_tokenizer else base)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise SettingsError(
            f"migrate: {adapter} cannot be merged into its base ({type(error).__name__}: {str(error)[:300]}). Set "
            f"base_model_name_or_path in its {CONFIG} to a model in reach."
        ) from None
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.merge_and_unload().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.replace(partial, output)
    return base
