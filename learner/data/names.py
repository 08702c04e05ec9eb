"""The name of a group: which prompt it samples, and for which pass over the data."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from json import encoder as json_encoder
from typing import Any, Literal, NamedTuple

_PREFIX = {"train": "e", "eval": "eval-"}
_WRITTEN = re.compile(r"(?P<prefix>e|eval-)(?P<number>\d+)-(?P<uid>.+)", re.DOTALL)


class GroupName(NamedTuple):
    """Example: str(GroupName("train", 2, "c10f")) == "e2-c10f"; the evaluation of step 50 has "eval-50-c10f"."""

    kind: Literal["train", "eval"]  # eval: of an evaluation's held-out prompt
    number: int  # train: the epoch, counted from 0; eval: the step that is evaluated
    uid: str  # of the prompt

    def __str__(self) -> str:
        return f"{_PREFIX[self.kind]}{self.number}-{self.uid}"

    @classmethod
    def parse(cls, text: str) -> "GroupName | None":
        """Return the name that is written so, None when this is no group's name."""
        found = _WRITTEN.fullmatch(text)
        if found is None:
            return None
        return cls("train" if found["prefix"] == "e" else "eval", int(found["number"]), found["uid"])


UID_BYTES = 10


def make_uid(name: str, number: int, prompt: Any, label: Any) -> str:
    """Return the uid of a row. name: of its file. number: its line or row there, counted from 1."""
    text = "".join(_chunks([name, number, prompt, label], 0))
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * UID_BYTES]


def _make_chunks() -> Callable[[Any, int], Sequence[str]]:
    """Return what writes JSON with sorted keys, and anything that JSON does not know as its text.

    json.JSONEncoder makes itself a new one of these for every text, which takes a third of its time.
    """
    make = getattr(json_encoder, "c_make_encoder", None)
    if make is None:  # Python built without its C extension
        encoder = json.JSONEncoder(sort_keys=True, check_circular=False, default=str)
        return lambda value, _: list(encoder.iterencode(value))
    made: Callable[[Any, int], Sequence[str]] = make(
        None, str, json_encoder.encode_basestring_ascii, None, ": ", ", ", True, False, True
    )
    return made


_chunks = _make_chunks()
