"""The top of the report: how the run ended, and the held-out scores before and after RL."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from learner.disk.run_folder import comparable_since, main_set
from learner.report.facts import LedgerFacts, RunFacts
from protocol.settings.settings import Settings

_TRAIN_STEPS = 10
HELD_OUT_LOSS = "eval/held_out/loss"
# Figure of a set's metrics eval/SET/ -> its label.
_SCORES = {"reward": "sampled at temperature {}", "greedy": "greedy"}

Line = Mapping[str, float]


@dataclass(frozen=True)
class ScoreRow:
    """One score at the first and at the last evaluation, as texts."""

    name: str
    before: str  # first score, such as 0.412 ± 0.013; empty: not measured
    after: str  # last score; empty: the run has one evaluation only
    gain: str  # difference, such as +0.120; empty: one of both is missing
    is_better: bool | None  # None: no gain is known, or it is 0
    has_error: bool  # both scores have a standard error
    is_clear: bool  # the gain is above two standard errors


@dataclass(frozen=True)
class Headline:
    """The top of the report, as texts."""

    ending: str  # one sentence: complete, or the step at which it stopped
    verdict: str  # one sentence: whether the run learns
    columns: tuple[str, str]  # titles of the columns before and after; the second is empty with one evaluation
    scores: list[ScoreRow]  # held-out scores, or training rewards in their place; may be empty
    explanation: list[str]  # sentences on how to read the scores
    facts: list[tuple[str, str, bool]]  # (name, value, is alarming) in reading order


def make_headline(run: RunFacts) -> Headline:
    scores, columns, explanation = _scores(run)
    return Headline(_ending(run), _verdict(scores), columns, scores, explanation, _facts(run))


def _compared_lines(lines: Sequence[Line]) -> tuple[Line, Line] | None:
    """Return the lines of the first and the last comparable evaluation; None without an evaluation."""
    scored = [line for line in lines if main_set(line)]
    if not scored:
        return None
    main = f"eval/{main_set(last := scored[-1])}/"
    of_set = (line for line in scored if f"{main}reward" in line)  # a resume may have brought the set
    return next(line for line in of_set if comparable_since(line, main) == comparable_since(last, main)), last


def compared_steps(lines: Sequence[Line]) -> tuple[int, int, str]:
    """Return the steps of the first and the last comparable evaluation, and their set; (0, 0, "") without any."""
    first, last = _compared_lines(lines) or ({}, {})
    begin, end = (int(line.get("eval/step", line.get("step", 0))) for line in (first, last))
    return begin, end, main_set(last) or ""


def _verdict(scores: Sequence[ScoreRow]) -> str:
    gains = [row for row in scores if row.gain]
    if not gains:
        return "Not known yet: that takes two evaluations."
    clear = [row for row in gains if row.is_clear]
    worse = [row for row in clear if not row.is_better]
    row = (worse or clear or gains)[-1]
    doubt = "" if clear else ", less than two standard errors" if row.has_error else ", without a standard error"
    ends = " → ".join(text.split(" ")[0] for text in (row.before, row.after))
    name = f"held-out score ({row.name})" if row.has_error else row.name
    return (
        f"{'No' if worse else 'Yes' if clear else 'Not shown' if row.has_error else 'Perhaps'}: {name} {ends}{doubt}."
    )


def _ending(run: RunFacts) -> str:
    step = int(run.lines[-1]["step"]) if run.lines else 0
    if run.settings is None:
        return f"{step} steps recorded."
    total = run.settings.run.max_steps
    return f"Complete: all {total} steps." if step >= total else f"Not complete: it is at step {step} of {total}."


def _scores(run: RunFacts) -> tuple[list[ScoreRow], tuple[str, str], list[str]]:
    """Return the held-out scores with column titles and explanation; without them the loss or training rewards."""
    if (compared := _compared_lines(run.lines)) is None:
        return _training_scores(run)
    first, last = compared
    temperature = _temperature(run.settings, main_set(last)) if run.settings else "unknown"
    rows = []
    for figure, label in _SCORES.items():
        key = f"eval/{main_set(last)}/{figure}"
        if key in first or key in last:
            errors = [line.get(f"{key}_error", math.nan) for line in (first, last)]
            after = last.get(key) if last is not first else None
            rows.append(_row(label.format(temperature), first.get(key), after, errors))
    has_warm_start = bool(run.settings and run.settings.policy.warm_start.data)
    before = "after the warm start, before RL" if has_warm_start else "before RL"
    columns = (
        f"step {version_of(first)}" if version_of(first) else before,
        "" if last is first else f"after {version_of(last)} step{'s' if version_of(last) != 1 else ''} of RL",
    )
    return rows, columns, _explain_scores(run, first, last, has_warm_start)


def _temperature(settings: Settings, name: str | None) -> str:
    """Return the temperature at which a held-out set is sampled."""
    own = next((one.temperature for one in settings.eval.sets if one.name == name), None)
    return f"{settings.rollout.temperature if own is None else own:g}"


def _explain_scores(run: RunFacts, first: Line, last: Line, has_warm_start: bool) -> list[str]:
    texts = []
    if version_of(first) == 0:
        origin = "the warm start" if has_warm_start else "the starting model"
        texts.append(f"The first column is the score of {origin} before RL; the change is the gain from RL.")
    else:
        texts.append(
            f"No score from before RL is recorded: the first evaluation is of step {version_of(first)}, so the gain "
            "leaves out the steps before it."
        )
    if since := int(comparable_since(last, f"eval/{main_set(last)}/")):
        texts.append(f"Steps before {since} had other reward endpoints or another held-out set: they are not compared.")
    if last is first:
        texts.append("There is one evaluation only: the gain from RL was not measured.")
    texts.append(
        "A gain at a temperature above 0 is partly higher confidence in known answers; the greedy score does not have "
        "that part."
    )
    if failed := [line for line in (first, last) if line.get("eval/failed", 0) > 0]:
        counts = ", ".join(f"{int(line['eval/failed'])} at step {version_of(line)}" for line in failed)
        texts.append(f"Held-out prompts that failed are not in the means: {counts}.")
    if (num_prompts := last.get(f"eval/{main_set(last)}/num_prompts")) is not None:
        texts.append(f"{num_prompts:g} held-out prompts; ± is one standard error over prompts.")
    return texts


def _training_scores(run: RunFacts) -> tuple[list[ScoreRow], tuple[str, str], list[str]]:
    if losses := [line for line in run.lines if HELD_OUT_LOSS in line]:
        since = comparable_since(losses[-1], HELD_OUT_LOSS)
        losses = [line for line in losses if comparable_since(line, HELD_OUT_LOSS) == since]
        before, after = losses[0][HELD_OUT_LOSS], losses[-1][HELD_OUT_LOSS]
        row = _row("held-out loss", before, after if len(losses) > 1 else None, [math.nan, math.nan])
        fell = replace(row, is_better=None if row.is_better is None else not row.is_better)
        text = f"Steps before {since:g} had other held-out rows or another loss: they are not compared."
        at = version_of(losses[0])
        columns = (f"step {at}" if at else "before training", f"step {version_of(losses[-1])}")
        return [fell], columns, [text] if since else []
    rewards = [line["reward/mean"] for line in run.reward_lines]
    num = min(_TRAIN_STEPS, len(rewards) // 2)
    text = "No held-out evaluation is on record: eval.every_steps is 0, or none had ended."
    if num == 0:
        return [], ("", ""), [text]
    first, last = sum(rewards[:num]) / num, sum(rewards[-num:]) / num
    row = _row("training reward", first, last, [math.nan, math.nan])
    steps = "step" if num == 1 else f"{num} steps"
    texts = [f"{text} Training rewards are shown instead."]
    if run.ledger is not None and (since := run.ledger.rewards_since):
        texts.append(f"Steps before {since} had other reward endpoints: they are not compared.")
    return [row], (f"first {steps}", f"last {steps}"), texts


def _row(name: str, before: float | None, after: float | None, errors: Sequence[float]) -> ScoreRow:
    gain = None if before is None or after is None else after - before
    return ScoreRow(
        name,
        score_text(before, errors[0]),
        score_text(after, errors[1]),
        "" if gain is None else f"{gain:+.3f}",
        None if not gain else gain > 0,
        not math.isnan(math.hypot(*errors)),
        gain is not None and abs(gain) > 2 * math.hypot(*errors),  # never without errors
    )


def _facts(run: RunFacts) -> list[tuple[str, str, bool]]:
    lines = run.lines
    facts: list[tuple[str, str, bool]] = []
    if len(lines) > 1 and "at_s" in lines[0] and "at_s" in lines[-1]:
        facts.append(("first to last step", _duration(lines[-1]["at_s"] - lines[0]["at_s"]), False))
    rates = [line["perf/samples_per_s"] for line in lines if "perf/samples_per_s" in line]
    if rates:
        facts.append(("samples/s, median step", f"{sorted(rates)[len(rates) // 2]:,.1f}", False))
    if run.ledger is not None:
        facts += _ledger_facts(run.ledger, run.settings)
    for name in ("retried", "skipped"):
        if lines and (number := lines[-1].get(f"data/{name}")):
            facts.append((f"{name} since the last start", f"{number:,.0f}", False))
    if run.num_redone:
        facts.append(("steps repeated after a resume", str(run.num_redone), False))
    return facts


def _ledger_facts(ledger: LedgerFacts, settings: Settings | None) -> list[tuple[str, str, bool]]:
    facts = [("starts of this run", str(ledger.num_starts), False)]
    if ledger.staleness:
        facts.append(("trajectories trained", f"{sum(ledger.staleness.values()):,}", False))
        oldest = max(ledger.staleness)
        allowed = settings.learner.max_staleness if settings else None
        text = f"{oldest}" if allowed is None else f"{oldest} (allowed {allowed})"
        facts.append(("largest staleness trained", text, allowed is not None and oldest > allowed))
    if ledger.finishes:
        cut = sum(ledger.finishes.get(kind, 0) for kind in ("length", "context", "turns", "time"))
        facts.append(("trajectories cut short", f"{cut / sum(ledger.finishes.values()):.1%}", False))
    return facts


def version_of(line: Line) -> int:
    """Return the policy version, or the step, that a line's evaluation scored: the line may be of a later step."""
    return int(line.get("eval/policy_version", line.get("eval/step", line["step"])))


def score_text(value: float | None, error: float = math.nan) -> str:
    """Return a score with its standard error; empty when it was not measured."""
    if value is None:
        return ""
    return f"{value:.3f}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
