"""Names of groups and uids of prompts."""

import hashlib
import json
import re
from typing import Any, Literal, NamedTuple

_PREFIX = {"train": "e", "eval": "eval-"}
_WRITTEN = re.compile(r"(?P<prefix>e|eval-)(?P<number>\d+)-(?P<uid>.+)", re.DOTALL)


class GroupName(NamedTuple):
    """Example: str(GroupName("train", 2, "c10f")) == "e2-c10f"; the evaluation of step 50 has "eval-50-c10f"."""

    kind: Literal["train", "eval"]  # use of the group; eval: a held-out prompt of an evaluation
    number: int  # train: epoch, from 0; eval: evaluated step
    uid: str

    def __str__(self) -> str:
        return f"{_PREFIX[self.kind]}{self.number}-{self.uid}"

    @classmethod
    def parse(cls, text: str) -> "GroupName | None":
        """Return the name that `text` is the string of; None for any other text."""
        found = _WRITTEN.fullmatch(text)
        if found is None:
            return None
        return cls("train" if found["prefix"] == "e" else "eval", int(found["number"]), found["uid"])


UID_BYTES = 10
HASH_BYTES = 8  # of `Prompt.row_hash`
_encode = json.JSONEncoder(sort_keys=True, check_circular=False, default=str).encode


def make_uid(name: str, number: int, prompt: Any, label: Any) -> str:
    """Return the uid of a row: a hash of a JSON text of file name, line or row number (from 1), prompt and label.

    The JSON text must never change: resumed runs find their prompts by uid.
    """
    text = _encode([name, number, prompt, label])
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * UID_BYTES]
