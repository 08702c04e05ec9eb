"""One thing that broke the promise: which rule, where, and what was found instead."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from learner.disk.layout import LEDGER

# A ledger that is wrong everywhere says so in a few lines, not in a million.
MAX_LINES_PER_RULE = 100


@dataclass(frozen=True)
class Breach:
    """One breach; as text, one line.

    Example:
    >>> str(Breach("group_size", "trajectories of its step: 3, expected 4", group="e0-a", step=2))
    'ledger.sqlite, group e0-a, step 2: trajectories of its step: 3, expected 4'
    """

    rule: str  # short name of the rule that was broken, such as group_size; breaches are counted by it
    problem: str  # what was found, and what was expected instead
    file: str = LEDGER  # path inside the run folder
    group: str | None = None  # name of the group it is about; None: of none
    step: int | None = None  # the step it is about, from 1; None: of none

    def __str__(self) -> str:
        where = [self.file]
        where += [f"group {self.group}"] if self.group is not None else []
        where += [f"step {self.step}"] if self.step is not None else []
        return f"{', '.join(where)}: {self.problem}"


@dataclass(frozen=True)
class Breaches:
    """Everything that broke the promise: all of it counted, the first of each rule kept."""

    counts: dict[str, int]  # rule -> how often it was broken; empty: the promise holds
    shown: list[Breach]  # in the order found, at most MAX_LINES_PER_RULE of each rule

    def lines(self) -> list[str]:
        """Return one line for each breach shown, then one for each rule with more of them."""
        more = {rule: count - MAX_LINES_PER_RULE for rule, count in self.counts.items() if count > MAX_LINES_PER_RULE}
        return [str(breach) for breach in self.shown] + [
            f"and {count:,} more that break the rule {rule}" for rule, count in more.items()
        ]


def collect(found: Iterable[Breach]) -> Breaches:
    """Return what was found, in order, cut where one rule has too many."""
    counts: Counter[str] = Counter()
    shown: list[Breach] = []
    for breach in found:
        counts[breach.rule] += 1
        if counts[breach.rule] <= MAX_LINES_PER_RULE:
            shown.append(breach)
    return Breaches(dict(counts), shown)
