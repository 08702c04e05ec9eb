"""`sluice migrate`: another trainer's command becomes a settings file.

Exit status: 0; 1 when options have no counterpart or are unknown, after the file is written; 2 for a file without a
command that it can read.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.migrate.convert import Draft, draft_of, finish
from deploy.migrate.openrlhf import convert_rl
from deploy.migrate.shell import words_after
from deploy.migrate.write import check, settings_file
from protocol.disk.files import replace_file
from protocol.errors import SettingsError

_OPENRLHF = re.compile(r"openrlhf\.cli\.(train_\w+)")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="sluice migrate", description="Convert another trainer's command. It is read, never run."
    )
    parser.add_argument("file", type=Path, help="shell script with an OpenRLHF command")
    parser.add_argument("--output", type=Path, metavar="FILE", help="settings file to write (default: the terminal)")
    parser.add_argument(
        "--accept", nargs="+", default=[], metavar="NAME", help="options whose loss you accept; all: every one"
    )
    given = parser.parse_args(arguments)
    try:
        draft, source = read(given.file)
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


def read(path: Path) -> tuple[Draft, str]:
    """Return a file's command as a draft, and the command's name.

    Raises: SettingsError when the file has no command of a known trainer.
    """
    found = words_after(path.read_text(encoding="utf-8"), _OPENRLHF)
    for place, (match, words) in enumerate(found):
        if match[1] in ("train_ppo_ray", "train_ppo"):
            draft = draft_of("OpenRLHF", "openrlhf_rl", options_in(words))
            convert_rl(draft)
            finish(draft, "openrlhf_rl")
            for other, _ in found[:place] + found[place + 1 :]:
                draft.missing[other[1]] = "One command is converted: give this one a file of its own"
            return draft, match[1]
    raise SettingsError(
        f"migrate: {path} has no command that is known here. Give a script with openrlhf.cli.train_ppo_ray."
    )


def options_in(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, value) of each --name value; a name without value is True, several values are joined."""
    found: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name, value if equals else "True"))
        elif found:
            name, value = found[-1]
            found[-1] = (name, word if value == "True" else f"{value} {word}")
    return found
