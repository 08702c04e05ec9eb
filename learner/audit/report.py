"""The result of an audit: the counts of prompts and tokens, and the breaches. Tables and JSON show the same facts."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from learner.audit.checkpoints import CheckpointAudit, check_checkpoints
from learner.audit.counts import (
    BookedTokens,
    DeadLetter,
    EpochAccount,
    Tokens,
    count_booked,
    count_epochs,
    count_tokens,
    list_dead_letters,
)
from learner.audit.rules import check_rules, note_metrics
from learner.audit.run import AuditedRun, Breach, Breaches, collect, open_run
from learner.audit.steps import Steps, Terms, read_steps


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
        """True without a breach."""
        return not self.breaches.counts

    @property
    def verdict(self) -> str:
        """One sentence."""
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
        breaches = collect(_check(run, steps, terms, checkpoints))
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


def _check(run: AuditedRun, steps: Steps, terms: Terms, checkpoints: CheckpointAudit) -> Iterator[Breach]:
    yield from check_rules(run, steps, terms)
    yield from check_checkpoints(run, steps, checkpoints)
