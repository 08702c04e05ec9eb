"""What a soak was seen to do, and whether that is good enough."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from learner.disk.run_folder import LEDGER

MAX_GROWTH = 0.05
MAX_LOST_SCORE = 0.1
MIN_GOODPUT = 0.8


@dataclass(frozen=True)
class Findings:
    """One run among faults, against the same run before them or without them."""

    num_faults: int
    has_recovered: bool  # it trained again once the faults were over
    is_whole: bool  # no step is missing
    growth: Mapping[str, float]  # share by which a kind of process has grown
    goodput: float  # samples a second against those without faults
    score: float | None = None  # held-out score among faults; None where it was not measured
    calm_score: float | None = None
    num_given_up: int = 0  # prompts that were skipped
    is_goodput_held: bool = False  # whether too little of it breaks the promise

    @property
    def worst_growth(self) -> float:
        return max(self.growth.values(), default=0.0)

    def broken(self) -> list[str]:
        """Return what was promised and did not hold; nothing when all did."""
        grown = [kind for kind, share in sorted(self.growth.items()) if share > MAX_GROWTH]
        promises = {
            "no fault came": self.num_faults == 0,
            "it does not train since the faults are over": not self.has_recovered,
            "steps are missing": not self.is_whole,
            f"{self.num_given_up} prompts were given up": self.num_given_up > 0,
            f"memory of {', '.join(grown)} grew by more than {MAX_GROWTH:.0%}": bool(grown),
            f"the held-out score {self.score} is below {self.calm_score} without faults": self._has_lost_score,
            f"goodput {self.goodput:.2f} is below {MIN_GOODPUT}": self.is_goodput_held and self.goodput < MIN_GOODPUT,
        }
        return [words for words, is_broken in promises.items() if is_broken]

    @property
    def _has_lost_score(self) -> bool:
        if self.score is None or self.calm_score is None:
            return False
        return self.score < self.calm_score - MAX_LOST_SCORE


def num_given_up(run: Path) -> int:
    """Return how many prompts the ledger in a run's folder has as skipped; the run may still go on."""
    with closing(sqlite3.connect(f"file:{run / LEDGER}?mode=ro", uri=True)) as ledger:
        (number,) = ledger.execute("SELECT count(*) FROM prompts WHERE state = 'skipped'").fetchone()
    return int(number)
