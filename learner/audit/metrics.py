"""The rule that metrics.jsonl tells of the same steps as the ledger.

The coordinator writes a step's line just before it commits the step: a run that is under way or was killed may be one
line ahead, and its last line may be cut off. A line that has to carry an evaluation is held back until that is done:
the metrics may then be one line behind. All three are noted, and put right by the next start.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from learner.audit.breach import Breach
from learner.audit.run import AuditedRun
from learner.audit.steps import Steps
from learner.disk.metrics_lines import parse_metrics_line
from learner.ledger.ledger import HELD_LINE

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class _StepFacts:
    """What the ledger's trajectories of a step say together."""

    num_samples: int
    reward_mean: float
    staleness_max: int


def note_metrics(run: AuditedRun, steps: Steps) -> list[str]:
    """Return what a reader should know that breaks nothing."""
    notes = []
    first = _first_step(run)
    if first > 1:
        notes.append(
            f"{METRICS}: begins at step {first}; earlier ones are in the folder that the run was resumed from."
        )
    if run.metrics and not run.metrics.endswith(b"\n"):
        notes.append(f"{METRICS}: the last line is cut off, as a kill leaves it.")
    if _last_step(run) == steps.last - 1 == _held_step(run) - 1:
        notes.append(f"{METRICS}: the line of step {steps.last} waits for an evaluation; the next start writes it.")
    if any(line["step"] == steps.last + 1 for _, line in _lines(run) if line is not None):
        notes.append(f"{METRICS}: the line of step {steps.last + 1} was written, its step not yet committed.")
    return notes


def check_metrics(run: AuditedRun, steps: Steps) -> Iterator[Breach]:
    """Yield lines that are none, steps that are missing, told twice or unknown to the ledger, and other numbers."""
    trained = _trained(run)
    previous = _first_step(run) - 1
    for number, line in _lines(run):
        if line is None:
            yield Breach("metrics", f"line {number} is no metrics line", METRICS)
            continue
        step = int(line["step"])
        if step == 0 and previous < 1:
            continue  # the evaluation before the first step
        if step != previous + 1:
            yield Breach("metrics", f"line {number} follows step {previous}", METRICS, step=step)
        previous = max(previous, step)
        if step in steps.accounts:
            expected = {"policy_version": float(steps.policy_version_after(step))}
            if steps.accounts[step].is_applied and step in trained:
                expected |= vars(trained[step])
            yield from _compare(number, step, line, expected)
        elif step > steps.last + 1:
            yield Breach("metrics", f"line {number} is of a step that the ledger does not know", METRICS, step=step)
    if previous < steps.last and not previous == steps.last - 1 == _held_step(run) - 1:
        missing = f"step {steps.last}" if previous == steps.last - 1 else f"steps {previous + 1} to {steps.last}"
        yield Breach("metrics", f"no line tells of {missing}, which the ledger accounts for", METRICS)


def _held_step(run: AuditedRun) -> int:
    """Return the step whose line the coordinator had held back when the ledger was written last, 0 when it had none."""
    line = parse_metrics_line(run.meta(HELD_LINE) or "")
    return 0 if line is None else int(line["step"])


def _last_step(run: AuditedRun) -> int:
    return max((int(line["step"]) for _, line in _lines(run) if line is not None), default=0)


def _first_step(run: AuditedRun) -> int:
    """Return the step that the metrics rightly begin with: 1, or that of a start from another folder's checkpoint."""
    first = next((int(line["step"]) for _, line in _lines(run) if line is not None and line["step"]), 1)
    starts = {from_step for (from_step,) in run.rows("SELECT DISTINCT from_step FROM terms")}
    return first if first in starts else 1


def _compare(number: int, step: int, line: Mapping[str, float], expected: Mapping[str, float]) -> Iterator[Breach]:
    for name, value in expected.items():
        told = line.get(name)
        # Lines keep seven digits.
        if told is None or not math.isclose(told, value, rel_tol=1e-6, abs_tol=1e-9):
            problem = f"line {number} says {name} {told if told is None else f'{told:.7g}'}, the ledger {value:.7g}"
            yield Breach("metrics", problem, METRICS, step=step)


def _lines(run: AuditedRun) -> Iterator[tuple[int, dict[str, float] | None]]:
    """Yield every whole line with its number, counted from 1."""
    whole, _, _ = run.metrics.rpartition(b"\n")
    for number, text in enumerate(whole.split(b"\n") if whole else [], start=1):
        yield number, parse_metrics_line(text)


def _trained(run: AuditedRun) -> dict[int, _StepFacts]:
    rows = run.rows(
        "SELECT step, COUNT(*), AVG(reward), MAX(staleness) FROM trajectories "
        "WHERE step IS NOT NULL AND kind = 'train' GROUP BY step"
    )
    return {step: _StepFacts(count, mean, staleness or 0) for step, count, mean, staleness in rows}
