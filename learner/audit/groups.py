"""The rules that hold for one group: trained once and whole, within the staleness bound, or skipped with a reason.

One pass over prompts and their trajectories.
"""

from collections.abc import Iterator
from typing import NamedTuple

from learner.audit.breach import Breach
from learner.audit.run import AuditedRun
from learner.audit.steps import Steps
from learner.audit.terms import Terms


class _Group(NamedTuple):
    """A prompt's row and what its trajectories say together; None where it has none."""

    group: str  # its name
    state: str  # pending, leased, ready, assigned, trained or skipped
    step: int | None  # that trained it, or that was not applied
    reason: str | None  # why it was skipped
    num_trajectories: int  # that the ledger has of it
    num_trained: int  # of them, inside any step
    num_of_step: int | None  # of them, inside the prompt's own step
    first_step: int | None  # smallest step of its trajectories
    last_step: int | None  # largest step of its trajectories
    first_sample: int | None  # smallest sample index
    last_sample: int | None  # largest sample index
    staleness: int | None  # largest of its trajectories, policy versions
    first_version: int | None  # smallest policy version that a staleness was counted from: oldest version + staleness
    last_version: int | None  # largest of these
    newest_version: int | None  # of any token


_GROUPS = """
SELECT p."group", p.state, p.step, p.reason, COUNT(t."group"), COUNT(t.step), SUM(t.step = p.step), MIN(t.step),
    MAX(t.step), MIN(t.sample_index), MAX(t.sample_index), MAX(t.staleness),
    MIN(t.oldest_version + t.staleness), MAX(t.oldest_version + t.staleness), MAX(t.newest_version)
FROM prompts AS p LEFT JOIN trajectories AS t ON t."group" = p."group" AND t.kind = 'train'
GROUP BY p."group" ORDER BY p."group"
"""


def check_groups(run: AuditedRun, steps: Steps, terms: Terms) -> Iterator[Breach]:
    """Yield what is wrong with single groups, and trajectories that belong to none."""
    for row in run.rows(_GROUPS):
        group = _Group(*row)
        if group.state == "trained":
            yield from _check_trained(group, steps, terms)
        else:
            yield from _check_untrained(group)
    for name, step in run.rows(
        "SELECT \"group\", MAX(step) FROM trajectories WHERE kind = 'train' "
        'AND "group" NOT IN (SELECT "group" FROM prompts) GROUP BY "group" ORDER BY "group"'
    ):
        yield Breach("trained_once", "has trajectories, but no prompt is accounted for by it", group=name, step=step)


def _check_trained(group: _Group, steps: Steps, terms: Terms) -> Iterator[Breach]:
    name, step = group.group, group.step
    if step is None or step not in steps.accounts:
        yield Breach("trained_once", "is trained, but by no step", group=name)
        return
    size = terms.at(step).group_size
    of_step = group.num_of_step or 0
    if group.num_trained > of_step:
        other = group.first_step if group.first_step != step else group.last_step
        problem = f"trajectories of another step, {other}: {group.num_trained - of_step}, expected none"
        yield Breach("trained_once", problem, group=name, step=step)
    elif of_step != size:
        yield Breach("group_size", f"trajectories of its step: {of_step}, expected {size}", group=name, step=step)
    elif group.num_trajectories > of_step:
        problem = f"trajectories that no step used: {group.num_trajectories - of_step}, expected none"
        yield Breach("group_size", problem, group=name, step=step)
    elif (group.first_sample, group.last_sample) != (0, size - 1):
        problem = f"has the samples {group.first_sample} to {group.last_sample}, expected 0 to {size - 1}"
        yield Breach("group_size", problem, group=name, step=step)
    if of_step:
        yield from _check_versions(group, step, steps.accounts[step].policy_version, terms.at(step).max_staleness)


def _check_versions(group: _Group, step: int, version: int, max_staleness: int) -> Iterator[Breach]:
    name = group.group
    if group.staleness is None or group.first_version is None or group.newest_version is None:
        yield Breach("staleness", "was trained without a staleness", group=name, step=step)
        return
    if group.staleness > max_staleness:
        problem = f"was trained at staleness {group.staleness}, at most {max_staleness} is allowed"
        yield Breach("staleness", problem, group=name, step=step)
    if not group.first_version == group.last_version == version:
        wrong = group.first_version if group.first_version != version else group.last_version
        problem = f"its staleness was counted from policy version {wrong}, the step was taken on {version}"
        yield Breach("step_version", problem, group=name, step=step)
    if group.newest_version > version:
        problem = f"contains policy version {group.newest_version}, the step was taken on {version}"
        yield Breach("step_version", problem, group=name, step=step)


def _check_untrained(group: _Group) -> Iterator[Breach]:
    if group.num_trained:
        problem = f"is {group.state}, its trajectories that were trained: {group.num_trained}, expected none"
        yield Breach("trained_once", problem, group=group.group, step=group.last_step)
    if group.state == "skipped" and not (group.reason or "").strip():
        yield Breach("skip_reason", "is skipped without a reason", group=group.group, step=group.step)
