"""The name of a group: which prompt it samples, and for which pass over the data."""

import re
from typing import Literal, NamedTuple

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
