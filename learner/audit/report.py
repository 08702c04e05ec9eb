"""The result of an audit: prompts by epoch, tokens by reason, skipped prompts, and the breaches.

Tables and JSON show the same facts.
"""

from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from learner.audit.checkpoints import CheckpointAudit, check_checkpoints
from learner.audit.rules import check_rules, note_metrics
from learner.audit.run import AuditedRun, Breaches, collect, open_run
from learner.audit.steps import Terms, read_steps
from learner.disk.run_folder import FILTERED
from learner.disk.token_books import TOTALS

_SETTLED = ("trained", "skipped", "filtered")


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
    # endpoints, settings or skipped
    what: str
    num_trajectories: int  # trajectories without repeats
    num_tokens: int  # model tokens of these


@dataclass(frozen=True)
class Failure:
    """One failed sample of a lease."""

    sample_index: int  # sample of the group, from 0
    attempt: int  # number within the group
    server: str
    boundary: str  # neighbour that failed: engine, reward:NAME, ...; server: the server died
    detail: str


@dataclass(frozen=True)
class DeadLetter:
    """A prompt that no step trained."""

    uid: str
    group: str
    reason: str
    step: int | None  # step that was not applied; None: the prompt failed
    attempts: int  # number of its leases
    failures: list[Failure]


@dataclass(frozen=True)
class BookedTokens:
    """Generated tokens by what became of them."""

    what: str  # trained, evaluation, under way, or why they are not trained
    num_tokens: int


@dataclass(frozen=True)
class AuditReport:
    """One run, audited at one moment."""

    run: str  # name of the run folder
    step: int  # number of the last step that ended; 0: none has
    max_steps: int
    policy_version: int  # version of the last step's weights
    num_starts: int  # starts of the run, including those whose steps were lost
    epochs: list[EpochAccount]  # epochs with a drawn prompt
    checkpoints: list[str]  # names of the folders that verify, in step order
    dead_letters: list[DeadLetter]  # skipped prompts, in the order of positions
    tokens: list[Tokens]  # trained tokens first, then wasted ones by reason, most first
    books: list[BookedTokens]  # every generated token once, by what became of it; empty without token books
    notes: list[str]  # sentences about facts that break no rule, such as a last line that a kill cut off
    breaches: Breaches

    @property
    def holds(self) -> bool:
        return not self.breaches.counts

    @property
    def verdict(self) -> str:
        trained, skipped = sum(e.trained for e in self.epochs), sum(e.skipped for e in self.epochs)
        filtered = f"{number:,} filtered, " if (number := sum(e.filtered for e in self.epochs)) else ""
        if not self.holds:
            return f"The accounts of {self.run} do not hold. Breaches: {sum(self.breaches.counts.values()):,}."
        under_way = sum(sum(e.under_way.values()) for e in self.epochs)
        return (
            f"The accounts of {self.run} hold: in {self.step} steps {trained:,} prompts were trained exactly once, "
            f"{skipped:,} skipped with a reason, {filtered}{under_way:,} are under way, "
            f"{sum(e.to_come for e in self.epochs):,} are to come. "
            f"Checkpoints that verify: {', '.join(self.checkpoints) or 'none'}."
        )

    def to_json(self) -> dict[str, object]:
        """Return every fact as JSON's types; a breach has its line too."""
        facts = asdict(self) | {"holds": self.holds, "verdict": self.verdict}
        facts["breaches"] = [asdict(breach) | {"line": str(breach)} for breach in self.breaches.shown]
        facts["num_breaches"] = self.breaches.counts
        return facts


def audit_run_folder(folder: Path, data: Path | None = None) -> AuditReport:
    """Return the audit of a run, reading only. data: the present path of its prompts, None: the settings'.

    Raises: SettingsError for a folder without a run, or missing prompts; OperatorError for a ledger that cannot be
    read.
    """
    with open_run(folder, data) as run:
        steps, terms = read_steps(run), Terms(run)
        checkpoints = CheckpointAudit()
        breaches = collect(chain(check_rules(run, steps, terms), check_checkpoints(run, steps, checkpoints)))
        return AuditReport(
            run=folder.resolve().name,
            step=steps.last,
            max_steps=run.settings.run.max_steps,
            policy_version=steps.policy_version_after(steps.last),
            num_starts=int(run.meta("incarnation") or 0),
            epochs=count_epochs(run),
            checkpoints=checkpoints.valid,
            dead_letters=list_dead_letters(run),
            tokens=count_tokens(run),
            books=count_booked(run),
            notes=[*note_metrics(run, steps), *terms.note_endpoints(), *checkpoints.notes],
            breaches=breaches,
        )


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


def count_booked(run: AuditedRun) -> list[BookedTokens]:
    """Return every generated token once: trained ones first, then most first. Empty for a run without books."""
    return [BookedTokens(*row) for row in run.rows(TOTALS)]


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
