"""By which settings each step is measured: those of the start that took it.

A resumed run may have another `learner.max_staleness` than its first start.
"""

from bisect import bisect_right
from dataclasses import dataclass

from learner.audit.run import AuditedRun


@dataclass(frozen=True)
class StepTerms:
    """The settings that a step is measured by."""

    group_size: int  # rollout.group_size: trajectories of one group
    groups_per_step: int  # learner.groups_per_step
    max_staleness: int  # learner.max_staleness, policy versions


class Terms:
    """Ledgers of the first schema have no terms: the settings of the run's last start stand for all."""

    def __init__(self, run: AuditedRun) -> None:
        learner = run.settings.learner
        current = {
            "group_size": run.settings.rollout.group_size,
            "groups_per_step": learner.groups_per_step,
            "max_staleness": learner.max_staleness,
        }
        changes: dict[int, dict[str, int]] = {}
        for from_step, name, value in run.rows("SELECT from_step, name, value FROM terms ORDER BY from_step"):
            changes.setdefault(from_step, {})[name] = value
        self._from_steps = sorted(changes)
        self._terms = [self._of(current)]
        for from_step in self._from_steps:
            current = current | {name: value for name, value in changes[from_step].items() if name in current}
            self._terms.append(self._of(current))

    def at(self, step: int) -> StepTerms:
        return self._terms[bisect_right(self._from_steps, step)]

    @staticmethod
    def _of(values: dict[str, int]) -> StepTerms:
        return StepTerms(values["group_size"], values["groups_per_step"], values["max_staleness"])
