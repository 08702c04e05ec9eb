"""The reasons for filtered, kept and left-out groups, as text in the ledger: written and parsed.

The audit parses them to check each decision. Their wording is part of the ledger's format.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

FILTERED = "filtered: "  # prefix for a group that was skipped because of its mean score
LEFT_OUT = f"{FILTERED}curriculum, "  # prefix for a prompt that the curriculum left out of an epoch
KEPT = "kept: "  # prefix for a group that was trained in spite of its mean score

_OUTSIDE_BOUNDS = re.compile(r"(?:filtered|kept): mean (\S+) (\S+) is not above (\S+) and below (\S+?)(?:;.*)?")
_LEFT_OUT_MEAN = re.compile(r"mean (\S+) (\S+) in epoch (\d+) is at (least|most) (\S+), drawn every (\d+) epochs")


class OutsideBounds(NamedTuple):
    """A group's mean score that is not inside the filter's bounds."""

    score: str  # name of the averaged score: reward, or a part of it
    mean: float  # mean over the group's samples
    low: float  # exclusive lower bound
    high: float  # exclusive upper bound

    def __str__(self) -> str:
        return f"mean {self.score} {self.mean!r} is not above {self.low!r} and below {self.high!r}"


class LeftOut(NamedTuple):
    """An earlier mean score because of which the curriculum leaves a prompt out of an epoch."""

    score: str  # name of the averaged score: reward, or a part of it
    mean: float  # mean over the samples of the prompt's group in the earlier epoch
    epoch: int  # earlier epoch
    is_easy: bool  # True: the mean is at least the bound; False: at most
    bound: float  # data.curriculum.easy or .hard
    every: int  # epochs from one draw to the next

    def __str__(self) -> str:
        return (
            f"mean {self.score} {self.mean!r} in epoch {self.epoch} is at {'least' if self.is_easy else 'most'} "
            f"{self.bound!r}, drawn every {self.every} epochs"
        )


def mean_score(scores: Sequence[float]) -> float:
    """Return the mean of a group's scores, in the order of its samples; exactly r when all are r."""
    return min(max(math.fsum(scores) / len(scores), min(scores)), max(scores))


def parse_left_out(reason: str) -> LeftOut | None:
    """Return the content of a reason that begins with LEFT_OUT; None for any other text."""
    match = _LEFT_OUT_MEAN.fullmatch(reason.removeprefix(LEFT_OUT))
    if match is None:
        return None
    score, mean, epoch, side, bound, every = match.groups()
    try:
        return LeftOut(score, float(mean), int(epoch), side == "least", float(bound), int(every))
    except ValueError:
        return None


def parse_outside_bounds(reason: str) -> OutsideBounds | None:
    """Return the content of a reason that begins with FILTERED or KEPT; None for any other text."""
    match = _OUTSIDE_BOUNDS.fullmatch(reason)
    if match is None:
        return None
    score, *numbers = match.groups()
    try:
        return OutsideBounds(score, *(float(number) for number in numbers))
    except ValueError:
        return None
