"""The audit's check of filter and curriculum: each group's mean score is computed again from the ledger.

- A filtered group: its mean lies at or outside the bounds in its reason. A start of the run had these bounds.
- A trained group: its mean lies strictly inside the bounds of its step, unless its reason says why it was kept.
- A prompt that the curriculum left out of an epoch: its group of a recent epoch had the mean in its reason.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from learner.audit.run import AuditedRun, Breach
from learner.audit.steps import StepTerms, Terms
from learner.data.filtered import (
    FILTERED,
    KEPT,
    LEFT_OUT,
    OutsideBounds,
    mean_score,
    parse_left_out,
    parse_outside_bounds,
)
from learner.data.names import GroupName
from learner.ledger.schema import has_scores

# SQL condition for the filter's groups, without those that the curriculum left out.
_IS_FILTERED = "p.state = 'skipped' AND p.reason LIKE ? AND p.reason NOT LIKE ?"


class _Sample(NamedTuple):
    """One sample of a settled group."""

    group: str
    state: str  # state of the group: trained, or skipped when it was filtered
    step: int | None  # step that trained the group
    reason: str  # reason in the ledger, or empty
    score: float | None  # the sample's score, or its reward if it has no score; None: the ledger has no such sample
    reward_parts: str | None  # reward parts by name, as JSON; None: the ledger has no such sample


def check_filters(run: AuditedRun, terms: Terms) -> Iterator[Breach]:
    """Yield a breach for each group that was filtered, left out or trained although its mean says otherwise."""
    yield from _check_curriculum(run)
    patterns = (f"{FILTERED}%", f"{LEFT_OUT}%")
    where = f"p.state = 'trained' OR ({_IS_FILTERED})" if terms.filters else _IS_FILTERED
    for _, rows in groupby(_samples(run, where, *patterns), lambda sample: sample.group):
        samples = list(rows)
        first = samples[0]
        if first.state == "skipped":
            problem = _filter_problem(samples, terms)
        else:
            problem = _training_problem(samples, terms.at(first.step or 0))
        if problem:
            yield Breach("filter", problem, group=first.group, step=first.step)


def _samples(run: AuditedRun, where: str, *values: object) -> Iterator[_Sample]:
    score = "COALESCE(t.reward_score, t.reward)" if has_scores(run.db) else "t.reward"
    query = (
        f"SELECT p.\"group\", p.state, p.step, COALESCE(p.reason, ''), {score}, t.reward_parts FROM prompts AS p "  # noqa: S608
        f'LEFT JOIN trajectories AS t ON t."group" = p."group" AND t.kind = \'train\' WHERE {where} '
        'ORDER BY p."group", t.sample_index'
    )
    return map(_Sample._make, run.rows(query, *values))


def _check_curriculum(run: AuditedRun) -> Iterator[Breach]:
    """Yield a breach for each prompt that was left out of an epoch for a wrong reason."""
    for group, epoch, uid, reason in run.rows(
        "SELECT \"group\", epoch, uid, reason FROM prompts WHERE state = 'skipped' AND reason LIKE ? ORDER BY position",
        f"{LEFT_OUT}%",
    ):
        stated = parse_left_out(reason)
        if stated is None:
            yield Breach("curriculum", f"was left out for a reason that names no mean: {reason!r}", group=group)
            continue
        earlier_group = str(GroupName("train", stated.epoch, uid))
        samples = list(_samples(run, 'p."group" = ?', earlier_group))
        mean = _mean(samples, stated.score) if samples and samples[0].score is not None else None
        if mean != stated.mean:
            stated_mean = f"a mean {stated.score} of {stated.mean} in {earlier_group}"
            yield Breach("curriculum", f"was left out for {stated_mean}, by the ledger it is {mean}", group=group)
        elif (stated.is_easy and mean < stated.bound) or (not stated.is_easy and mean > stated.bound):
            problem = f"was left out, but {stated} does not match the stated reason"
            yield Breach("curriculum", problem, group=group)
        elif not 0 < epoch - stated.epoch < stated.every:
            problem = (
                f"was left out of epoch {epoch}, {epoch - stated.epoch} epochs after {earlier_group}, for {stated}"
            )
            yield Breach("curriculum", problem, group=group)


def _filter_problem(samples: list[_Sample], terms: Terms) -> str | None:
    """Return why a filtered group should not have been filtered; None: its reason is right."""
    stated = parse_outside_bounds(samples[0].reason)
    if samples[0].score is None:
        return "is filtered, but the ledger has no sample of it"
    if stated is None:
        return f"is filtered for a reason that names no bounds: {samples[0].reason!r}"
    if (stated.score, stated.low, stated.high) not in terms.filters:
        return f"was filtered by {stated.score} between {stated.low} and {stated.high}, which no start of the run had"
    if (mean := _mean(samples, stated.score)) != stated.mean:
        return f"was filtered for a mean {stated.score} of {stated.mean}, by the ledger it is {mean}"
    if stated.low < mean < stated.high:
        return f"was filtered, though its mean {stated.score} {mean} is above {stated.low} and below {stated.high}"
    return None


def _training_problem(samples: list[_Sample], terms: StepTerms) -> str | None:
    """Return why a trained group should have been filtered; None: it was rightly trained."""
    if not terms.filter_score or samples[0].reason.startswith(KEPT) or samples[0].score is None:
        return None
    mean = _mean(samples, terms.filter_score)
    if terms.filter_low < mean < terms.filter_high:
        return None
    # The ledger's column returns whole numbers as integers.
    outside = OutsideBounds(terms.filter_score, mean, float(terms.filter_low), float(terms.filter_high))
    return f"was trained, though its {outside}"


def _mean(samples: list[_Sample], score: str) -> float:
    if score == "reward":
        return mean_score([sample.score or 0.0 for sample in samples])
    return mean_score([float(json.loads(sample.reward_parts or "{}").get(score, 0.0)) for sample in samples])
