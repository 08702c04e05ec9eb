"""Generated pages of docs/look_up, from the code: `python -m tests.reference_pages` writes settings and commands."""

import inspect
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deploy.command import VERBS, run_verb
from protocol.settings import settings as source

_FOLDER = Path(__file__).resolve().parents[1] / "docs" / "look_up"
_COMMANDS_HEAD = """# Commands

Generated from the code by `python -m tests.reference_pages`; a test keeps it current. Each verb returns 0, 1, 2 or 130
([exit codes](exit_codes.md)). Programs read `--json`. `sluice run --help SECTION` explains [settings](settings.md).
"""
_HEAD = """# Settings

Generated from the code by `python -m tests.reference_pages`; a test keeps it current.
In a YAML file a setting is `section: {name: value}`, on the command line `--section.name value`. Lists and maps are
JSON there. `[]` marks the fields of each entry of a list. `learner.recipe` changes some defaults
([algorithms](../do/algorithms.md)).
"""


def settings_page() -> str:
    """Return the page: one table for each section, with every setting's default, values and meaning."""
    comments = dict(re.findall(r"^    (\w+): \w+ = \w+\(\)  # (.+)$", inspect.getsource(source), re.M))
    parts = [_HEAD]
    for name, field in source.Settings.model_fields.items():
        if _model(field) is None:
            row = f"`{name}`", _default(field), _values(field.annotation, field), _cell(field.description or "")
            parts.append(f"| setting | default | values | meaning |\n|---|---|---|---|\n| {' | '.join(row)} |")
            continue
        parts.append(f"\n## {name}\n\n{comments[name][0].upper()}{comments[name][1:]}.\n")
        parts.append("| setting | default | values | meaning |\n|---|---|---|---|")
        parts += [f"| {' | '.join(row)} |" for row in _rows(name, _model(field))]
    return "\n".join(parts) + "\n"


def commands_page() -> str:
    """Return the page: what each verb is for, and its help."""
    parts, verbs = [_COMMANDS_HEAD], dict[str, str]()
    for name, verb in VERBS.items():
        text = _help(name)
        same = verbs.setdefault(text, name)
        text = f"```text\n{text}\n```" if same == name else f"Its options are those of [{same}](#{same})."
        parts.append(f"\n## {name}\n\n{verb.about[0].upper()}{verb.about[1:]}.\n\n{text}")
    return "\n".join(parts) + "\n"


def _help(verb: str) -> str:
    """Return what `sluice VERB --help` prints on a terminal of 100 columns."""
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    with redirect_stdout(io.StringIO()) as output, suppress(SystemExit):
        run_verb([verb, "--help"])
    if width is None:
        del os.environ["COLUMNS"]
    else:
        os.environ["COLUMNS"] = width
    return output.getvalue().strip()


def _rows(path: str, model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        inner = _model(field)
        is_list = inner is not None and get_origin(field.annotation) is list
        if inner is None or is_list:
            yield f"`{path}.{name}`", _default(field), _values(field.annotation, field), _cell(field.description or "")
        if inner is not None:
            yield from _rows(f"{path}.{name}{'[]' if is_list else ''}", inner)


def _model(field: FieldInfo) -> Any:
    """Return the section or record of a field; None for a plain value."""
    kinds = [field.annotation, *get_args(field.annotation)]
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if len(models) == 1 else None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return _cell(f"`{json.dumps(value, default=str)}`") if value != "" else "empty"


def _values(kind: Any, field: FieldInfo | None = None) -> str:
    origin, parts = get_origin(kind), [part for part in get_args(kind) if part is not type(None)]
    if origin is Annotated:
        return _values(parts[0])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, UnionType):
        null = ", `null`" if type(None) in get_args(kind) else ""
        return ", ".join(dict.fromkeys(map(_values, parts))) + null
    if origin in (list, tuple):
        return f"list of {_values(parts[0])}"
    name = {"HttpUrl": "URL", "str": "text", "Any": "any"}.get(getattr(kind, "__name__", ""), "") or {
        dict: "map", bool: "`true`, `false`", int: "integer", float: "number"
    }.get(origin or kind, "map")  # fmt: skip
    bounds = [text for each in (field.metadata if field else []) for text in _bounds(each)]
    return " ".join((name, *dict.fromkeys(bounds)))


def _bounds(limit: Any) -> Iterator[str]:
    for sign, attribute in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
        value = getattr(limit, attribute, None)
        if value is not None and value < 2**31 - 1:
            yield f"{sign} {value:g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


PAGES = {_FOLDER / "settings.md": settings_page, _FOLDER / "commands.md": commands_page}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
