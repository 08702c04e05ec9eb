"""The steps of the surviving lineage by the ledger, and the settings that each step is measured by.

Those are the settings of the start that took the step: a resumed run may have another `learner.max_staleness`.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from learner.audit.run import AuditedRun
from learner.ledger.ledger import terms_of


@dataclass(frozen=True)
class StepAccount:
    """The ledger's groups of one step."""

    num_trained: int  # groups that it trained
    num_skipped: int  # groups skipped because it was not applied
    policy_version: int  # policy version that it began with: number of applied steps before it

    @property
    def is_applied(self) -> bool:
        return self.num_trained > 0


@dataclass(frozen=True)
class Steps:
    """All steps in the ledger."""

    accounts: dict[int, StepAccount]  # step -> its groups, in step order
    last: int  # number of the newest step; 0: none has ended

    def policy_version_after(self, step: int) -> int:
        """Return the number of applied steps up to and including this one."""
        place = bisect_right(self._numbers, step)
        if not place:
            return 0
        account = self.accounts[self._numbers[place - 1]]
        return account.policy_version + account.is_applied

    @cached_property
    def _numbers(self) -> list[int]:
        return sorted(self.accounts)


def read_steps(run: AuditedRun) -> Steps:
    """Return the steps of the ledger's trained groups, and of the groups skipped with a step."""
    accounts: dict[int, StepAccount] = {}
    version = 0
    for step, num_trained, num_skipped in run.rows(
        "SELECT step, SUM(state = 'trained'), SUM(state = 'skipped') FROM prompts "
        "WHERE state IN ('trained', 'skipped') AND step IS NOT NULL GROUP BY step ORDER BY step"
    ):
        accounts[step] = StepAccount(num_trained, num_skipped, version)
        version += accounts[step].is_applied
    return Steps(accounts, max(accounts, default=0))


@dataclass(frozen=True)
class StepTerms:
    """The settings that a step is measured by."""

    group_size: int
    groups_per_step: int
    max_staleness: int  # policy versions
    endpoints: str = ""  # rewards.endpoints: name, url and weight of each, and rewards.combine; empty: not recorded


class Terms:
    """The terms of each step. A run that has not begun has none: its settings count."""

    def __init__(self, run: AuditedRun) -> None:
        names = set(StepTerms.__dataclass_fields__)
        current: dict[str, Any] = terms_of(run.settings) | {"endpoints": ""}
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
        """Return a sentence with the reward endpoints of each part of the run, if they changed."""
        scorers = {step: self.at(step).endpoints for step in self._from_steps}
        changes = {step: text for step, text in scorers.items() if text and text != self.at(step - 1).endpoints}
        if len(changes) < 2:
            return []
        return ["Reward endpoints: " + "; ".join(f"from step {step} on {text}" for step, text in changes.items()) + "."]
