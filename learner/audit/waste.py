"""What was generated and not trained, by reason; and the prompts that were given up, with every failure of theirs."""

from dataclasses import dataclass

from learner.audit.run import AuditedRun
from learner.data.filtered import FILTERED


@dataclass(frozen=True)
class Tokens:
    """Tokens that the model wrote and that share a fate."""

    # "trained", or why they were not: stale, filtered, duplicate, lineage, unknown, rejected, restart, failed,
    # endpoints (of a start with other reward endpoints) or skipped
    what: str
    num_trajectories: int  # each counted once, however often a server sent it
    num_tokens: int  # that the model wrote in them


@dataclass(frozen=True)
class Failure:
    """One sample that did not come back from one lease."""

    sample_index: int  # which sample of the group, from 0
    attempt: int  # leases of the group until then, that one included
    server: str  # rollout server that had the lease
    boundary: str  # which neighbour failed: engine, reward:NAME, ...; server: the server itself died
    detail: str  # for people: what happened


@dataclass(frozen=True)
class DeadLetter:
    """A prompt that no step trained."""

    uid: str  # of the prompt's row
    group: str  # name of its group
    reason: str  # why it was skipped
    step: int | None  # that was not applied; None: the prompt itself was given up
    attempts: int  # leases of it
    failures: list[Failure]  # of all its samples, in the order they came


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

    Besides the ledger's own entries, finished trajectories of prompts that were skipped are wasted: as "skipped". What
    one lease made of one sample was generated once, however often a server sent it: it counts once, by the reason that
    says most, and not at all when it was trained after all (a server gave it again after a restart).
    """
    trained = run.db.execute(
        "SELECT COUNT(*), COALESCE(SUM(num_model_tokens), 0) FROM trajectories "
        "WHERE step IS NOT NULL AND kind = 'train'"
    ).fetchone()
    return [Tokens("trained", *trained), *(Tokens(*row) for row in run.rows(_WASTED))]


def list_dead_letters(run: AuditedRun) -> list[DeadLetter]:
    """Return every skipped prompt in the order in which they were given out; filtered ones are none."""
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
