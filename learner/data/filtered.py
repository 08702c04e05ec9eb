"""Groups whose mean score was not inside the filter's bounds: what the ledger says of them, written and read back."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

# What the reason of a group begins with that was skipped because of its mean score.
FILTERED = "filtered: "
# What the reason of a group begins with that was not drawn in its epoch, because of its mean score in an earlier one.
RESTED = f"{FILTERED}curriculum, "
# What the reason of a group begins with that was trained in spite of its mean score.
KEPT = "kept: "

_SAID = re.compile(r"(?:filtered|kept): mean (\S+) (\S+) is not above (\S+) and below (\S+?)(?:;.*)?")

_RESTED_SAID = re.compile(r"mean (\S+) (\S+) in epoch (\d+) is at (least|most) (\S+), drawn every (\d+) epochs")


class OutsideBounds(NamedTuple):
    """Why a group says nothing to the learner."""

    score: str  # what was averaged: reward, or the name of one part of it
    mean: float  # over the group's samples
    low: float  # a group is of use when its mean is above this
    high: float  # and below this

    def __str__(self) -> str:
        return f"mean {self.score} {self.mean!r} is not above {self.low!r} and below {self.high!r}"


class Rested(NamedTuple):
    """Why a prompt is not drawn in an epoch."""

    score: str  # what was averaged: reward, or the name of one part of it
    mean: float  # over the samples of its group of the earlier epoch
    epoch: int  # that epoch
    is_easy: bool  # the mean is at least the bound; False: at most
    bound: float
    every: int  # epochs from one draw to the next

    def __str__(self) -> str:
        return (
            f"mean {self.score} {self.mean!r} in epoch {self.epoch} is at {'least' if self.is_easy else 'most'} "
            f"{self.bound!r}, drawn every {self.every} epochs"
        )


def mean_score(scores: Sequence[float]) -> float:
    """Return the mean of a group's scores, in the order of its samples; exactly r when all are r."""
    return min(max(math.fsum(scores) / len(scores), min(scores)), max(scores))


def read_rested(reason: str) -> Rested | None:
    """Return what a reason that begins with RESTED says; None when it is no such reason."""
    said = _RESTED_SAID.fullmatch(reason.removeprefix(RESTED))
    if said is None:
        return None
    try:
        return Rested(said[1], float(said[2]), int(said[3]), said[4] == "least", float(said[5]), int(said[6]))
    except ValueError:
        return None


def read_reason(reason: str) -> OutsideBounds | None:
    """Return what a reason that begins with FILTERED or KEPT says; None when it is no such reason."""
    said = _SAID.fullmatch(reason)
    if said is None:
        return None
    try:
        return OutsideBounds(said[1], *(float(number) for number in said.groups()[1:]))
    except ValueError:
        return None
