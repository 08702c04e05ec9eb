"""The report's first lines: how the run ended, and what held-out scores RL started from and reached."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.report.facts import EvalScore, LedgerFacts, RunFacts
from protocol.settings.settings import Settings

_TRAIN_STEPS = 10


@dataclass(frozen=True)
class ScoreRow:
    """One score, as texts: at the first evaluation and at the last."""

    name: str  # what was scored, with its metrics key
    before: str  # first score, such as 0.412 ± 0.013; empty: not measured
    after: str  # last score, likewise; empty: the run has one evaluation only
    gain: str  # last less first, such as +0.120; empty unless both were measured
    is_better: bool | None  # None: no gain is known, or it is 0


@dataclass(frozen=True)
class Headline:
    """The report's first lines, as texts."""

    ending: str  # one sentence: complete, or at which step it stopped
    columns: tuple[str, str]  # titles of the columns before and after; the second empty with one evaluation
    scores: list[ScoreRow]  # held-out, or training rewards where nothing was held out; may be empty
    explanation: list[str]  # sentences on how to read the scores
    facts: list[tuple[str, str, bool]]  # (name, value, is alarming) in reading order


def make_headline(run: RunFacts) -> Headline:
    """Return what a reader wants to know first. Says what was not measured; adds nothing that was not."""
    scores, columns, explanation = _scores(run)
    return Headline(_ending(run), columns, scores, explanation, _facts(run))


def _ending(run: RunFacts) -> str:
    step = int(run.lines[-1]["step"]) if run.lines else 0
    if run.settings is None:
        return f"{step} steps recorded."
    total = run.settings.run.max_steps
    if step >= total:
        return f"Complete: all {total} steps."
    return f"Not complete: it stopped (or still is) at step {step} of {total}."


def _scores(run: RunFacts) -> tuple[list[ScoreRow], tuple[str, str], list[str]]:
    """Return the held-out table, or the training rewards where nothing was held out."""
    scored = [line for line in run.lines if "eval_reward" in line or "eval_reward_greedy" in line]
    if not scored:
        return _training_scores(run)
    first, last = scored[0], scored[-1]
    temperature = f"{run.settings.rollout.temperature:g}" if run.settings else "unknown"
    names = {
        "eval_reward": f"sampled at temperature {temperature} (eval_reward)",
        "eval_reward_greedy": "greedy (eval_reward_greedy)",
    }
    rows = []
    for key, name in names.items():
        if key in first or key in last:
            is_greedy = key == "eval_reward_greedy"
            errors = [_error(run.ledger, line, is_greedy) for line in (first, last)]
            rows.append(_row(name, first.get(key), last.get(key) if last is not first else None, errors))
    columns = (_column(first, run.settings), "" if last is first else f"after {_version(last)} steps of RL")
    return rows, columns, _explain_scores(run, first, last)


def _explain_scores(run: RunFacts, first: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    texts = []
    if _version(first) == 0:
        origin = "the warm start" if run.settings and run.settings.policy.warm_start.data else "the starting model"
        texts.append(f"The first column is what {origin} had reached before RL; the difference is all that RL added.")
    else:
        texts.append(
            f"No score from before RL is on record: the first evaluation is of step {_version(first)}, so the gain "
            "leaves out what the steps before it did."
        )
    if last is first:
        texts.append("There is one evaluation only: what RL added was not measured.")
    texts.append(
        "A gain at a temperature above 0 is partly the policy growing surer of what it knew already; "
        "the greedy score does not have that part."
    )
    if failed := [line for line in (first, last) if line.get("eval_failed", 0) > 0]:
        counts = ", ".join(f"{int(line['eval_failed'])} at step {_version(line)}" for line in failed)
        texts.append(f"Held-out prompts that failed for good are not in the means: {counts}.")
    score = _ledger_score(run.ledger, last, True) or _ledger_score(run.ledger, last, False)
    if score is not None:
        texts.append(f"{score.num_prompts} held-out prompts; ± is one standard error over prompts.")
    return texts


def _training_scores(run: RunFacts) -> tuple[list[ScoreRow], tuple[str, str], list[str]]:
    rewards = [line["reward_mean"] for line in run.lines if "reward_mean" in line]
    num = min(_TRAIN_STEPS, len(rewards) // 2)
    text = "No held-out evaluation is on record: eval.every_steps is 0, or none had ended."
    if num == 0:
        return [], ("", ""), [text]
    first, last = sum(rewards[:num]) / num, sum(rewards[-num:]) / num
    row = _row("training reward", first, last, [math.nan, math.nan])
    return [row], (f"first {num} steps", f"last {num} steps"), [f"{text} Training rewards stand in for it."]


def _row(name: str, before: float | None, after: float | None, errors: Sequence[float]) -> ScoreRow:
    gain = None if before is None or after is None else after - before
    return ScoreRow(
        name,
        _shown(before, errors[0]),
        _shown(after, errors[1]),
        "" if gain is None else f"{gain:+.3f}",
        None if not gain else gain > 0,
    )


def _column(line: Mapping[str, float], settings: Settings | None) -> str:
    if _version(line) > 0:
        return f"step {_version(line)}"
    return "after the warm start, before RL" if settings and settings.policy.warm_start.data else "before RL"


def _facts(run: RunFacts) -> list[tuple[str, str, bool]]:
    lines = run.lines
    facts: list[tuple[str, str, bool]] = []
    if len(lines) > 1 and "at_s" in lines[0] and "at_s" in lines[-1]:
        facts.append(("first to last step", _duration(lines[-1]["at_s"] - lines[0]["at_s"]), False))
    if samples := sum(line.get("num_samples", 0) for line in lines):
        facts.append(("trajectories trained", f"{samples:,.0f}", False))
    rates = [line["samples_per_s"] for line in lines if "samples_per_s" in line]
    if rates:
        facts.append(("samples/s, median step", f"{sorted(rates)[len(rates) // 2]:,.1f}", False))
    if run.ledger is not None:
        facts += _ledger_facts(run.ledger, run.settings)
    if lines:
        for key in ("retried", "skipped"):
            if key in lines[-1]:
                facts.append((f"{key} since the last start", f"{lines[-1][key]:,.0f}", False))
    if run.num_redone:
        facts.append(("steps taken again after a resume", str(run.num_redone), False))
    return facts


def _ledger_facts(ledger: LedgerFacts, settings: Settings | None) -> list[tuple[str, str, bool]]:
    facts = [("starts of this run", str(ledger.num_starts), False)]
    if ledger.staleness:
        oldest = max(ledger.staleness)
        allowed = settings.learner.max_staleness if settings else None
        text = f"{oldest}" if allowed is None else f"{oldest} (allowed {allowed})"
        facts.append(("largest staleness trained", text, allowed is not None and oldest > allowed))
    if ledger.finishes:
        cut = sum(ledger.finishes.get(kind, 0) for kind in ("length", "context", "turns", "time"))
        facts.append(("trajectories cut short", f"{cut / sum(ledger.finishes.values()):.1%}", False))
    return facts


def _version(line: Mapping[str, float]) -> int:
    """Return how many optimizer steps were inside the weights that were scored: the line may be of a later step."""
    return int(line.get("eval_policy_version", line["step"]))


def _error(ledger: LedgerFacts | None, line: Mapping[str, float], is_greedy: bool) -> float:
    score = _ledger_score(ledger, line, is_greedy)
    return math.nan if score is None else score.error


def _ledger_score(ledger: LedgerFacts | None, line: Mapping[str, float], is_greedy: bool) -> EvalScore | None:
    """Return the ledger's account of a line's evaluation, if it is of the same trajectories: the means agree."""
    score = None if ledger is None else ledger.eval_scores.get((_version(line), is_greedy))
    value = line.get("eval_reward_greedy" if is_greedy else "eval_reward", math.nan)
    return score if score is not None and math.isclose(score.mean, value, rel_tol=1e-5, abs_tol=1e-9) else None


def _shown(value: float | None, error: float) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
