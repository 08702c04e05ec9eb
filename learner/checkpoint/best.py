"""The checkpoint of the best evaluation, kept in addition to the newest ones; `checkpoints/best` names it.

An evaluation ends after the checkpoint of its step was saved. The checkpoint is kept until its score is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from learner.disk.run_folder import MetricsReader, comparable_since
from protocol.disk.files import sync
from protocol.settings.evaluation import EvalSettings

BEST = "best"
_STEP = "step_"


@dataclass(frozen=True)
class BestBy:
    """The order of checkpoints."""

    metric: str  # a key of metrics.jsonl, such as eval/held_out/reward
    is_highest: bool  # the highest value is the best
    every_steps: int  # steps between evaluations (eval.every_steps)


def best_of(settings: EvalSettings) -> BestBy | None:
    """Return the order by which the best checkpoint is chosen; None when none is kept."""
    if settings.best is None:
        return None
    return BestBy(settings.best, settings.best_is == "highest", settings.every_steps)


def keep_best(root: Path, run: Path, by: BestBy) -> set[int]:
    """Point `best` at the best evaluated checkpoint of the folder `root`; returns the steps to keep.

    These are the best one and the evaluated steps without a score. run: the folder of metrics.jsonl. The earliest of
    equal scores is the best. Scores of earlier reward endpoints or sets do not count. Raises: OSError.
    """
    numbers = [path.name.removeprefix(_STEP) for path in root.glob(f"{_STEP}*")]
    steps = {int(number) for number in numbers if number.isdecimal()}
    scores, evaluated = _read_scores(run, by.metric)
    unscored = {step for step in steps if step > evaluated and step % by.every_steps == 0}
    best = find_best({step: score for step, score in scores.items() if step in steps}, by.is_highest)
    if best is None:
        return unscored
    _point(root, f"{_STEP}{best:06d}")
    return unscored | {best}


def find_best(scores: Mapping[int, float], is_highest: bool) -> int | None:
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
    aside.replace(link)
    sync(root)
