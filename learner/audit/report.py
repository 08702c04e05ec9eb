"""Everything an audit found: the accounts of prompts and tokens, and what broke the promise.

A table and JSON show the same facts: both are made of `AuditReport`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from learner.audit.breach import Breach, Breaches, collect
from learner.audit.checkpoints import CheckpointAudit, check_checkpoints
from learner.audit.deciles import Survivorship, compare_lengths
from learner.audit.epochs import EpochAccount, count_epochs
from learner.audit.filters import check_filters
from learner.audit.groups import check_groups
from learner.audit.lineage import check_lineage
from learner.audit.metrics import check_metrics, note_metrics
from learner.audit.order import check_order
from learner.audit.run import AuditedRun, open_run
from learner.audit.steps import Steps, check_steps, read_steps
from learner.audit.terms import Terms
from learner.audit.waste import DeadLetter, Tokens, count_tokens, list_dead_letters


@dataclass(frozen=True)
class AuditReport:
    """One run, audited at one moment."""

    run: str  # name of the run's folder
    step: int  # the last one that ended; 0: none has
    max_steps: int  # of the run's settings
    policy_version: int  # applied optimizer steps inside the last step's weights
    num_starts: int  # of the run, those whose steps were lost included
    epochs: list[EpochAccount]  # every epoch of which a prompt was given out
    checkpoints: list[str]  # names of the folders that verify, in step order
    dead_letters: list[DeadLetter]  # every skipped prompt, in the order they were given out
    tokens: list[Tokens]  # trained ones first, then wasted ones by reason, most first
    survivorship: Survivorship  # whether long answers are lost more often
    notes: list[str]  # sentences about what breaks nothing, such as a last line that a kill cut off
    breaches: Breaches  # what broke the promise

    @property
    def holds(self) -> bool:
        """True when nothing broke the promise."""
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
    """Return the audit of a run, reading only. data: where its prompts lie now, None: where its settings say.

    Raises: SettingsError for a folder that is no run's, or prompts that are not there; OperatorError for a ledger that
    cannot be read.
    """
    with open_run(folder, data) as run:
        steps = read_steps(run)
        checkpoints = CheckpointAudit()
        breaches = collect(_check(run, steps, checkpoints))
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
            survivorship=compare_lengths(run),
            notes=[*note_metrics(run, steps), *Terms(run).note_endpoints(), *checkpoints.notes],
            breaches=breaches,
        )


def _check(run: AuditedRun, steps: Steps, checkpoints: CheckpointAudit) -> Iterator[Breach]:
    """Yield what breaks any rule."""
    terms = Terms(run)
    for (damage,) in run.rows("PRAGMA quick_check(10)"):
        if damage != "ok":
            yield Breach("ledger_file", f"is damaged: {damage}")
    yield from check_order(run)
    yield from check_groups(run, steps, terms)
    yield from check_steps(run, steps, terms)
    yield from check_filters(run, terms)
    yield from check_lineage(run)
    yield from check_metrics(run, steps)
    yield from check_checkpoints(run, steps, checkpoints)
