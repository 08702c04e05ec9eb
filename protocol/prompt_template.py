"""A prompt's template: text with a row's columns in braces.

"Question: {question}\\nAnswer:"     the column `question`
"User: {}\\nAssistant: "             the column of data.prompt_key
"{extra_info[question]}"            inside a column
"{{}}"                              braces as they are
"""

import re
import string
from typing import NamedTuple

_PATH = re.compile(r"(?P<column>[^.\[\]]*)(?P<inside>(?:\[[^\[\]]+\])*)")


class Part(NamedTuple):
    """Literal text, then a place; the last part may have none."""

    text: str
    place: tuple[str, ...] | None  # column, then the keys inside it; ("",): the prompt's column


def parse_template(text: str) -> list[Part]:
    """Return the template's parts. Raises: ValueError with the problem."""
    try:
        found = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"is not a template ({error}). Write a literal brace twice") from None
    parts = [_part(literal, field, spec, conversion) for literal, field, spec, conversion in found]
    if all(part.place is None for part in parts):
        raise ValueError("is a template without a place: every prompt would be the same. Name a column, as {question}")
    return parts


def _part(literal: str, field: str | None, spec: str | None, conversion: str | None) -> Part:
    if field is None:
        return Part(literal, None)
    path = _PATH.fullmatch(field)
    if spec or conversion or path is None or (path["inside"] and not path["column"]):
        raise ValueError(
            f"has the place {{{field}}}, expected {{}}, {{column}} or {{column[key]}}. Write a literal brace twice"
        )
    return Part(literal, (path["column"], *re.findall(r"\[([^\[\]]+)\]", path["inside"])))
