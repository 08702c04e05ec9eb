"""The steps of the surviving lineage as the ledger tells them, and the rules that hold for a step as a whole."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from learner.audit.breach import Breach
from learner.audit.run import AuditedRun
from learner.audit.terms import Terms
from learner.ledger.ledger import NOT_APPLIED


@dataclass(frozen=True)
class StepAccount:
    """What the ledger's groups of one step say together."""

    num_trained: int  # groups inside it
    num_skipped: int  # groups skipped because it was not applied
    policy_version: int  # of the weights that it was taken on: applied steps before it

    @property
    def is_applied(self) -> bool:
        return self.num_trained > 0


@dataclass(frozen=True)
class Steps:
    """All steps that the ledger knows."""

    accounts: dict[int, StepAccount]  # step -> what became of its groups, in step order
    last: int  # the newest step; 0: none has ended

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
    """Return the steps that the ledger's trained groups, and those skipped with a step, belong to."""
    accounts: dict[int, StepAccount] = {}
    version = 0
    for step, num_trained, num_skipped in run.rows(
        "SELECT step, SUM(state = 'trained'), SUM(state = 'skipped') FROM prompts "
        "WHERE state IN ('trained', 'skipped') AND step IS NOT NULL GROUP BY step ORDER BY step"
    ):
        accounts[step] = StepAccount(num_trained, num_skipped, version)
        version += accounts[step].is_applied
    return Steps(accounts, max(accounts, default=0))


def check_steps(run: AuditedRun, steps: Steps, terms: Terms) -> Iterator[Breach]:
    """Yield what is wrong with steps: gaps, wrong sizes, half applied ones, a wrong count of them."""
    previous = 0
    for step, account in steps.accounts.items():
        if step < 1:
            yield Breach("steps_contiguous", "is no step: they are counted from 1", step=step)
            continue
        if step > previous + 1:
            missing = f"steps {previous + 1} to {step - 1}" if step > previous + 2 else f"step {previous + 1}"
            yield Breach("steps_contiguous", f"no group is of {missing}, but some are of this one", step=step)
        previous = step
        yield from _check_step(step, account, terms.at(step).groups_per_step)
    yield from _check_reasons(run)
    version = int(run.meta("policy_version") or 0)
    if version != (applied := steps.policy_version_after(steps.last)):
        yield Breach("policy_version", f"says policy version {version}, but {applied} steps were applied")


def _check_step(step: int, account: StepAccount, groups_per_step: int) -> Iterator[Breach]:
    if account.num_trained and account.num_skipped:
        problem = f"{account.num_trained} of its groups are trained and {account.num_skipped} skipped"
        yield Breach("step_whole", f"{problem}: a step is applied whole or not at all", step=step)
    elif account.is_applied and account.num_trained != groups_per_step:
        yield Breach("step_size", f"groups trained: {account.num_trained}, expected {groups_per_step}", step=step)
    elif not account.is_applied and account.num_skipped != groups_per_step:
        problem = f"was not applied; groups skipped for it: {account.num_skipped}, expected {groups_per_step}"
        yield Breach("step_size", problem, step=step)


def _check_reasons(run: AuditedRun) -> Iterator[Breach]:
    for group, step, reason in run.rows(
        "SELECT \"group\", step, COALESCE(reason, '') FROM prompts WHERE state = 'skipped' AND step IS NOT NULL "
        "AND COALESCE(reason, '') NOT LIKE ? ORDER BY step, position",
        f"{NOT_APPLIED}%",
    ):
        problem = f"is skipped with its step for the reason {reason!r}, expected one that begins {NOT_APPLIED!r}"
        yield Breach("not_applied_reason", problem, group=group, step=step)
