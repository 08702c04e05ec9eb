"""The counts of an audit: prompts by epoch, tokens by reason, skipped prompts, and attempts by answer length.

A system that loses long answers trains on short ones, and no curve shows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learner.audit.run import AuditedRun
from learner.data.filtered import FILTERED

_SETTLED = ("trained", "skipped", "filtered")
_NUM_DECILES, _NUM_LONG = 10, 3
# Standard errors of a significant difference; chance alone exceeds them in 1 of 40 audits.
_SIGNIFICANT = 2.0
_MIN_PROMPTS = 10


@dataclass(frozen=True)
class EpochAccount:
    """The prompts of one epoch by state; the five numbers add up to num_prompts."""

    epoch: int  # number from 0
    num_prompts: int  # rows of the training data; with weighted entries, drawn prompts
    trained: int  # prompts of applied steps
    skipped: int  # prompts that failed too often, or whose step was not applied
    under_way: dict[str, int]  # other drawn prompts by the ledger's state: pending, leased, ready, assigned
    to_come: int  # prompts not drawn yet
    filtered: int = 0  # prompts replaced or left out for a mean score


@dataclass(frozen=True)
class Tokens:
    """Model tokens by reason."""

    # "trained", or the reason of waste: stale, filtered, duplicate, lineage, unknown, rejected, restart, failed,
    # endpoints or skipped
    what: str
    num_trajectories: int  # trajectories without repeats
    num_tokens: int  # model tokens of these


@dataclass(frozen=True)
class Failure:
    """One failed sample of a lease."""

    sample_index: int  # sample of the group, from 0
    attempt: int  # number within the group
    server: str  # rollout server
    boundary: str  # neighbour that failed: engine, reward:NAME, ...; server: the server died
    detail: str  # cause, for people


@dataclass(frozen=True)
class DeadLetter:
    """A prompt that no step trained."""

    uid: str  # uid of the prompt's row
    group: str  # name of its group
    reason: str  # reason of the skip
    step: int | None  # step that was not applied; None: the prompt failed
    attempts: int  # number of its leases
    failures: list[Failure]  # failures in order


@dataclass(frozen=True)
class Decile:
    """A tenth of the prompts, by the length of their answers."""

    shortest: float | None  # model tokens, mean of the group; None: no answer
    longest: float | None  # the same for the longest
    num_prompts: int  # prompts trained or skipped
    num_retried: int  # prompts leased more than once
    num_skipped: int  # prompts skipped
    attempts_mean: float  # leases of one prompt


@dataclass(frozen=True)
class Survivorship:
    """Retries and skips by answer length."""

    deciles: list[Decile]  # shortest answers first; prompts without any answer last
    sentence: str  # statement on retries and skips of long answers


def count_epochs(run: AuditedRun) -> list[EpochAccount]:
    """Return one account for each epoch with a drawn prompt; a run that has not begun has the first."""
    states: dict[int, dict[str, int]] = {0: {}}
    for epoch, state, count in run.rows(
        "SELECT epoch, CASE WHEN state = 'skipped' AND reason LIKE ? THEN 'filtered' ELSE state END AS fate, COUNT(*) "
        "FROM prompts GROUP BY epoch, fate",
        f"{FILTERED}%",
    ):
        states.setdefault(epoch, {})[state] = count
    # Weighted entries have epochs of their own.
    size = len(run.uids) if run.settings.data.weights() is None else 0
    return [
        EpochAccount(
            epoch=epoch,
            num_prompts=size or sum(counts.values()),
            trained=counts.get("trained", 0),
            skipped=counts.get("skipped", 0),
            under_way={s: n for s, n in sorted(counts.items()) if s not in _SETTLED},
            to_come=max(0, size - sum(counts.values())),
            filtered=counts.get("filtered", 0),
        )
        for epoch, counts in sorted(states.items())
    ]


_WASTED = """
WITH fates AS (
    SELECT "group", sample_index, attempt, reason, num_tokens FROM waste
    UNION ALL
    SELECT t."group", t.sample_index, t.attempt, 'skipped', t.num_model_tokens
    FROM prompts AS p JOIN trajectories AS t ON t."group" = p."group" WHERE p.state = 'skipped' AND t.step IS NULL
), ranked AS (
    SELECT *, ROW_NUMBER() OVER (
        PARTITION BY "group", sample_index, attempt
        ORDER BY reason IN ('skipped', 'restart', 'duplicate', 'unknown'), reason IN ('restart', 'duplicate', 'unknown')
    ) AS place FROM fates
)
SELECT r.reason, COUNT(*), SUM(r.num_tokens) FROM ranked AS r LEFT JOIN trajectories AS t
ON t."group" = r."group" AND t.sample_index = r.sample_index AND t.attempt = r.attempt AND t.step IS NOT NULL
WHERE r.place = 1 AND t.step IS NULL GROUP BY r.reason ORDER BY 3 DESC, 1
"""


def count_tokens(run: AuditedRun) -> list[Tokens]:
    """Return trained tokens first, then wasted ones by reason, most first.

    Finished trajectories of skipped prompts are wasted as "skipped". A sample of one lease counts once, by the
    most telling reason, and not at all if it was sent again and trained.
    """
    trained = run.db.execute(
        "SELECT COUNT(*), COALESCE(SUM(num_model_tokens), 0) FROM trajectories "
        "WHERE step IS NOT NULL AND kind = 'train'"
    ).fetchone()
    return [Tokens("trained", *trained), *(Tokens(*row) for row in run.rows(_WASTED))]


def list_dead_letters(run: AuditedRun) -> list[DeadLetter]:
    """Return every skipped prompt in the order of positions, without filtered ones."""
    failures: dict[str, list[Failure]] = {}
    for group, *facts in run.rows(
        'SELECT "group", sample_index, attempt, server, boundary, detail FROM failures WHERE "group" IN '
        "(SELECT \"group\" FROM prompts WHERE state = 'skipped') ORDER BY rowid"
    ):
        failures.setdefault(group, []).append(Failure(*facts))
    rows = run.rows(
        "SELECT uid, \"group\", COALESCE(reason, ''), step, attempt FROM prompts WHERE state = 'skipped' "
        "AND COALESCE(reason, '') NOT LIKE ? ORDER BY position",
        f"{FILTERED}%",
    )
    return [
        DeadLetter(uid, group, reason, step, attempts, failures.get(group, []))
        for uid, group, reason, step, attempts in rows
    ]


# A skipped prompt without a finished answer has the length of its wasted tokens. A filtered prompt was not lost.
_DECILES = """
WITH wasted AS (SELECT "group", AVG(num_tokens) AS length FROM waste WHERE num_tokens > 0 GROUP BY "group"),
lengths AS (
    SELECT p.state, p.attempt, COALESCE(AVG(t.num_model_tokens), w.length) AS length FROM prompts AS p
    LEFT JOIN trajectories AS t ON t."group" = p."group" LEFT JOIN wasted AS w ON w."group" = p."group"
    WHERE p.state IN ('trained', 'skipped') AND COALESCE(p.reason, '') NOT LIKE ? GROUP BY p."group"
), parts AS (SELECT *, NTILE(10) OVER (PARTITION BY length IS NULL ORDER BY length) AS part FROM lengths)
SELECT IIF(length IS NULL, 11, part) AS place, MIN(length), MAX(length), COUNT(*), SUM(attempt > 1),
    SUM(state = 'skipped'), AVG(attempt) FROM parts GROUP BY place ORDER BY place
"""


def compare_lengths(run: AuditedRun) -> Survivorship:
    """Return attempts and skips of all settled prompts, by the length of their answers."""
    deciles = {place: Decile(*facts) for place, *facts in run.rows(_DECILES, f"{FILTERED}%")}
    long = [decile for place, decile in deciles.items() if _NUM_DECILES - _NUM_LONG < place <= _NUM_DECILES]
    short = [decile for place, decile in deciles.items() if place <= _NUM_DECILES - _NUM_LONG]
    unknown = deciles.get(_NUM_DECILES + 1)
    return Survivorship(list(deciles.values()), _sentence(long, short, 0 if unknown is None else unknown.num_prompts))


def _sentence(long: Sequence[Decile], short: Sequence[Decile], num_unknown: int) -> str:
    num_long, num_short = (sum(decile.num_prompts for decile in part) for part in (long, short))
    if min(num_long, num_short) < _MIN_PROMPTS:
        return "Too few prompts are accounted for to compare long answers with short ones."
    parts = []
    for what, name in (("leased again", "num_retried"), ("skipped", "num_skipped")):
        in_long, in_short = (sum(getattr(decile, name) for decile in part) for part in (long, short))
        both = (in_long + in_short) / (num_long + num_short)
        error = math.sqrt(both * (1 - both) * (1 / num_long + 1 / num_short))
        is_more = in_long / num_long - in_short / num_short > _SIGNIFICANT * error
        shares = f"({in_long / num_long:.2%} against {in_short / num_short:.2%})"
        parts.append(f"{'' if is_more else 'not '}{what} more often than the others {shares}")
    unknown = f" Of {num_unknown} prompts no answer's length is known." if num_unknown else ""
    return f"The prompts with the longest three tenths of the answers were {parts[0]}, and {parts[1]}.{unknown}"
