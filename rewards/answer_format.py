"""The bundled format scorer: 1 if the response consists of the expected tags only, else 0.

Example, `think,search*,information*,answer`: `<think>a</think> <answer>b</answer>` gives 1. Text outside the tags, an
unclosed tag, a missing `think`, a second `answer` or a block after `answer` gives 0. A tag that the prompt ends with
belongs to the response.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import OperatorError
from rewards.sample import Sample, Score, Scorer

DEFAULT_TAGS = "think,answer"
_NAME = re.compile(r"[A-Za-z][\w-]*")
_TAG = re.compile(r"<(/?)([A-Za-z][\w-]*)>")


@dataclass(frozen=True)
class Form:
    """The tags of a response."""

    needed: frozenset[str]  # tags that occur at least once
    allowed: frozenset[str]  # tags that occur any number of times
    last: str  # tag that ends the response; occurs once


def make_format_scorer(tags: str) -> Scorer:
    """Return the scorer for the tags of `--tags`: comma-separated names, with `*` after optional ones."""
    return functools.partial(_score, form_of(tags))


def form_of(tags: str) -> Form:
    """Return the form in a `--tags` text. Raises: OperatorError for an invalid text."""
    parts = [part.strip() for part in tags.split(",")]
    names = [part.removesuffix("*") for part in parts]
    is_sound = all(_NAME.fullmatch(name) for name in names) and len(set(names)) == len(names)
    if not is_sound or parts[-1].endswith("*"):
        raise OperatorError(
            f"rewards: --tags {tags} is not a list of tags. Expected comma-separated names, each once, with * after "
            "optional ones, and a last name without *: think,search*,information*,answer."
        )
    allowed = frozenset(part.removesuffix("*") for part in parts if part.endswith("*"))
    return Form(frozenset(names) - allowed, allowed, names[-1])


def has_form(text: str, form: Form) -> bool:
    """Return whether text is a sequence of blocks `<name>..</name>` of the form, separated by white space.

    Only the form's tags count; other angle brackets are text. A block is not empty and contains no tag.
    """
    known = form.needed | form.allowed
    tags = [match for match in _TAG.finditer(text) if match.group(2) in known]
    counts = Counter(tag.group(2) for tag in tags[::2])
    outside, end = "", 0
    for opening, closing in zip(tags[::2], tags[1::2], strict=False):
        is_block = (opening.group(1), closing.group(1)) == ("", "/") and opening.group(2) == closing.group(2)
        if not is_block or not text[opening.end() : closing.start()].strip():
            return False
        outside += text[end : opening.start()]
        end = closing.end()
    outside += text[end:]
    if len(tags) % 2 or outside.strip() or any(not counts[name] for name in form.needed):
        return False
    return counts[form.last] == 1 and tags[-1].group(2) == form.last


async def _score(form: Form, samples: Sequence[Sample]) -> list[Score]:
    return [Score(1.0 if has_form(_opened(sample, form) + sample.text, form) else 0.0) for sample in samples]


def _opened(sample: Sample, form: Form) -> str:
    """Return the tag that the prompt ends with, or nothing: some chat templates open `<think>` themselves."""
    tags = (f"<{name}>" for name in form.needed | form.allowed)
    end, start = sample.prompt.rstrip(), sample.text.lstrip()
    return next((tag for tag in tags if end.endswith(tag) and not start.startswith(tag)), "")
