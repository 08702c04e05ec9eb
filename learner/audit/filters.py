"""The rule that the filter on scores did what its settings say: each group's mean is computed anew from the ledger.

A filtered group's mean lies at or outside the bounds that its reason names, and those are bounds that the run had. A
trained group's mean lies strictly inside those of its step, unless its reason says that it was kept in spite of it. A
prompt that the curriculum left out of an epoch had the mean that its reason names, in an epoch that is not long ago.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from learner.audit.breach import Breach
from learner.audit.run import AuditedRun
from learner.audit.terms import StepTerms, Terms
from learner.data.filtered import FILTERED, KEPT, RESTED, OutsideBounds, mean_score, read_reason, read_rested
from learner.data.names import GroupName
from learner.ledger.schema import knows_scores

_SAMPLES = """
SELECT p."group", p.state, p.step, COALESCE(p.reason, ''), {score}, t.reward_parts
FROM prompts AS p LEFT JOIN trajectories AS t ON t."group" = p."group" AND t.kind = 'train'
WHERE p.state = 'trained' OR (p.state = 'skipped' AND p.reason LIKE ? AND p.reason NOT LIKE ?)
ORDER BY p."group", t.sample_index
"""
_RESTED_PROMPTS = """
SELECT "group", epoch, uid, reason FROM prompts WHERE state = 'skipped' AND reason LIKE ? ORDER BY position
"""
_SAMPLES_OF = """
SELECT p."group", p.state, p.step, COALESCE(p.reason, ''), {score}, t.reward_parts
FROM prompts AS p LEFT JOIN trajectories AS t ON t."group" = p."group" AND t.kind = 'train'
WHERE p."group" = ? ORDER BY t.sample_index
"""


class _Sample(NamedTuple):
    """One sample of a settled group."""

    group: str  # its name
    state: str  # trained, or skipped when it was filtered
    step: int | None  # that trained it
    reason: str  # of the prompt; empty: none
    score: (
        float | None
    )  # of the sample, its reward where it was given none; None: the ledger has no sample of the group
    reward_parts: str | None  # JSON, part by name; None as above


def check_filters(run: AuditedRun, terms: Terms) -> Iterator[Breach]:
    """Yield groups that were filtered though their mean says otherwise, and the other way round."""
    yield from _check_curriculum(run)
    filtered, rested = f"{FILTERED}%", f"{RESTED}%"
    if not terms.filters and run.db.execute(
        "SELECT NOT EXISTS (SELECT 1 FROM prompts WHERE state = 'skipped' AND reason LIKE ? AND reason NOT LIKE ?)",
        (filtered, rested),
    ).fetchone() == (1,):
        return
    for _, rows in groupby(_samples(run, _SAMPLES, filtered, rested), lambda sample: sample.group):
        samples = list(rows)
        first = samples[0]
        if first.state == "skipped":
            problem = _check_filtered(samples, terms)
        else:
            problem = _check_trained(samples, terms.at(first.step or 0))
        if problem:
            yield Breach("filter", problem, group=first.group, step=first.step)


def _samples(run: AuditedRun, query: str, *values: object) -> Iterator[_Sample]:
    score = "COALESCE(t.reward_score, t.reward)" if knows_scores(run.db) else "t.reward"
    return map(_Sample._make, run.rows(query.format(score=score), *values))


def _check_curriculum(run: AuditedRun) -> Iterator[Breach]:
    for group, epoch, uid, reason in run.rows(_RESTED_PROMPTS, f"{RESTED}%"):
        said = read_rested(reason)
        if said is None:
            yield Breach("curriculum", f"was not drawn for a reason that names no mean: {reason!r}", group=group)
            continue
        earlier = str(GroupName("train", said.epoch, uid))
        samples = list(_samples(run, _SAMPLES_OF, earlier))
        mean = _mean(samples, said.score) if samples and samples[0].score is not None else None
        if mean != said.mean:
            problem = f"was not drawn for a mean {said.score} of {said.mean} in {earlier}, by the ledger it is {mean}"
            yield Breach("curriculum", problem, group=group)
        elif mean < said.bound if said.is_easy else mean > said.bound:
            yield Breach("curriculum", f"was not drawn, though its {said} is not so", group=group)
        elif not 0 < epoch - said.epoch < said.every:
            problem = f"was not drawn in epoch {epoch}, {epoch - said.epoch} epochs after {earlier}, for {said}"
            yield Breach("curriculum", problem, group=group)


def _check_filtered(samples: list[_Sample], terms: Terms) -> str | None:
    said = read_reason(samples[0].reason)
    if samples[0].score is None:
        return "is filtered, but the ledger has no sample of it"
    if said is None:
        return f"is filtered for a reason that names no bounds: {samples[0].reason!r}"
    if (said.score, said.low, said.high) not in terms.filters:
        return f"was filtered by {said.score} between {said.low} and {said.high}, which no start of the run had"
    if (mean := _mean(samples, said.score)) != said.mean:
        return f"was filtered for a mean {said.score} of {said.mean}, by the ledger it is {mean}"
    if said.low < mean < said.high:
        return f"was filtered, though its mean {said.score} {mean} is above {said.low} and below {said.high}"
    return None


def _check_trained(samples: list[_Sample], terms: StepTerms) -> str | None:
    if not terms.filter_score or samples[0].reason.startswith(KEPT) or samples[0].score is None:
        return None
    mean = _mean(samples, terms.filter_score)
    if terms.filter_low < mean < terms.filter_high:
        return None
    # The ledger's column gives whole numbers back as integers.
    outside = OutsideBounds(terms.filter_score, mean, float(terms.filter_low), float(terms.filter_high))
    return f"was trained, though its {outside}"


def _mean(samples: list[_Sample], score: str) -> float:
    if score == "reward":
        return mean_score([sample.score or 0.0 for sample in samples])
    return mean_score([float(json.loads(sample.reward_parts or "{}").get(score, 0.0)) for sample in samples])
