"""The checkpoint of the best evaluation, kept in addition to the newest ones; `checkpoints/best` names it.

An evaluation ends after the checkpoint of its step was saved. The checkpoint is kept until its score is known.
"""

from collections.abc import Container, Mapping
from pathlib import Path

from learner.checkpoint.folder import make_room, name_of, newer_than, step_of
from learner.disk.run_folder import MetricsReader, comparable_since
from protocol.disk.files import sync
from protocol.settings.evaluation import EvalSettings

BEST = "best"


def keep_best(root: Path, run: Path, evals: EvalSettings) -> set[int]:
    """Point `best` at the best evaluated checkpoint of the folder `root`; returns the steps to keep.

    These are the best one by eval.best and the evaluated steps without a score; none without eval.best. run: the folder
    of metrics.jsonl. The earliest of equal scores is the best. Scores of earlier reward endpoints or sets do not count.
    Raises: OSError.
    """
    if evals.best is None:
        return set()
    steps = set(map(step_of, newer_than(root, -1)))
    scores, evaluated = _read_scores(run, evals.best)
    unscored = {step for step in steps if step > evaluated and step % evals.every_steps == 0}
    if (best := _best_of(scores, steps, evals)) is None:
        return unscored
    _point(root, name_of(best))
    return unscored | {best}


def best_of(steps: Container[int], run: Path, evals: EvalSettings) -> int | None:
    """Return the best evaluated one of these steps, by eval.best; None without any. run: as of `keep_best`."""
    return None if evals.best is None else _best_of(_read_scores(run, evals.best)[0], steps, evals)


def _best_of(scores: Mapping[int, float], steps: Container[int], evals: EvalSettings) -> int | None:
    scored = {step: score for step, score in scores.items() if step in steps}
    return find_best(scored, is_highest=evals.best_is == "highest")


def find_best(scores: Mapping[int, float], *, is_highest: bool) -> int | None:
    """Return the step of the best score, the earliest of equals; None of none."""
    return min(scores, key=lambda step: (-scores[step] if is_highest else scores[step], step), default=None)


def _read_scores(run: Path, metric: str) -> tuple[dict[int, float], int]:
    """Return (score by evaluated step, newest evaluated step or -1)."""
    lines = [line for line in MetricsReader(run / "metrics.jsonl").new_lines() if "eval/step" in line]
    since = max((comparable_since(line, metric) for line in lines), default=0)
    scored = [line for line in lines if metric in line and comparable_since(line, metric) == since]
    scores = {int(line["eval/step"]): line[metric] for line in scored}
    return scores, max((int(line["eval/step"]) for line in lines), default=-1)


def _point(root: Path, name: str) -> None:
    link = root / BEST
    if link.is_symlink() and link.readlink().name == name:
        return
    aside = root / f".{BEST}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    make_room(link)
    aside.replace(link)
    sync(root)
