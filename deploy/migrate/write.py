"""The settings file: each line with the option that it comes from, and below them what has no line."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from deploy.migrate.convert import Draft
from protocol.errors import SettingsError
from protocol.settings.loader import describe_settings, validate_settings
from protocol.settings.settings import Settings

_NO_EFFECT = re.compile(r"settings: ([\w.]+) = .* has no effect: (.*)", re.S)


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
