"""Groups whose mean score was not inside the filter's bounds: what the ledger says of them, written and read back."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

# What the reason of a group begins with that was skipped because of its mean score.
FILTERED = "filtered: "
# What the reason of a group begins with that was trained in spite of its mean score.
KEPT = "kept: "

_SAID = re.compile(r"(?:filtered|kept): mean (\S+) (\S+) is not above (\S+) and below (\S+?)(?:;.*)?")


class OutsideBounds(NamedTuple):
    """Why a group says nothing to the learner."""

    score: str  # what was averaged: reward, or the name of one part of it
    mean: float  # over the group's samples
    low: float  # a group is of use when its mean is above this
    high: float  # and below this

    def __str__(self) -> str:
        return f"mean {self.score} {self.mean!r} is not above {self.low!r} and below {self.high!r}"


def mean_score(scores: Sequence[float]) -> float:
    """Return the mean of a group's scores, in the order of its samples; exactly r when all are r."""
    return min(max(math.fsum(scores) / len(scores), min(scores)), max(scores))


def read_reason(reason: str) -> OutsideBounds | None:
    """Return what a reason that begins with FILTERED or KEPT says; None when it is no such reason."""
    said = _SAID.fullmatch(reason)
    if said is None:
        return None
    try:
        return OutsideBounds(said[1], *(float(number) for number in said.groups()[1:]))
    except ValueError:
        return None
