"""By which settings each step is measured: those of the start that took it.

A resumed run may have another `learner.max_staleness` than its first start.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from learner.audit.run import AuditedRun
from learner.ledger.terms import terms_of


@dataclass(frozen=True)
class StepTerms:
    """The settings that a step is measured by."""

    group_size: int  # rollout.group_size: trajectories of one group
    groups_per_step: int  # learner.groups_per_step
    max_staleness: int  # learner.max_staleness, policy versions
    endpoints: str = ""  # rewards.endpoints: name, url and weight of each, and rewards.combine; empty: not recorded
    filter_score: str = ""  # filter.score: what the filter averages; empty: no group is filtered
    filter_low: float = 0.0  # filter.low: a trained group's mean is above it
    filter_high: float = 0.0  # filter.high: and below this


class Terms:
    """Ledgers of the first schema have no terms: the settings of the run's last start stand for all."""

    def __init__(self, run: AuditedRun) -> None:
        names = set(StepTerms.__dataclass_fields__)
        # A ledger without these terms is of a run that had no filter, and that recorded no endpoints.
        current: dict[str, Any] = {
            name: value
            for name, value in terms_of(run.settings).items()
            if not name.startswith("filter_") and name != "endpoints"
        }
        changes: dict[int, dict[str, Any]] = {}
        for from_step, name, value in run.rows("SELECT from_step, name, value FROM terms ORDER BY from_step"):
            changes.setdefault(from_step, {})[name] = value
        self._from_steps = sorted(changes)
        self._terms = [StepTerms(**current)]
        for from_step in self._from_steps:
            current = current | {name: value for name, value in changes[from_step].items() if name in names}
            self._terms.append(StepTerms(**current))

    def at(self, step: int) -> StepTerms:
        return self._terms[bisect_right(self._from_steps, step)]

    def note_endpoints(self) -> list[str]:
        """Return a sentence on which reward endpoints scored from which step on; none while they stayed the same."""
        scorers = [(1, self._terms[0].endpoints), *((s, self.at(s).endpoints) for s in self._from_steps)]
        changes = [(step, text) for i, (step, text) in enumerate(scorers) if text and text != scorers[i - 1][1]]
        known = [text for _, text in scorers if text]
        if len(set(known)) < 2:
            return []
        return ["Reward endpoints: " + "; ".join(f"from step {step} on {text}" for step, text in changes) + "."]

    @property
    def filters(self) -> set[tuple[str, float, float]]:
        """Return what any start of the run filtered by: score and bounds."""
        return {(t.filter_score, t.filter_low, t.filter_high) for t in self._terms if t.filter_score}
