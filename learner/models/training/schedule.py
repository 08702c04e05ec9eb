"""The learning rate over the course of a run, as a share of its peak."""

import math
from collections.abc import Callable


def learning_rate_factor(done: int, *, warmup_steps: int, total_steps: int, min_ratio: float, schedule: str) -> float:
    """Return the share of the peak learning rate for the update that follows `done` applied ones.

    Linear from 1 / warmup_steps to 1, then `schedule` down to min_ratio at update total_steps, then flat.
    Example: warmup_steps 2, total_steps 4, linear to 0 gives 0.5, 1.0, 0.5, 0.0, 0.0.
    Raises: KeyError for a schedule that is not in SCHEDULES.
    """
    shape = SCHEDULES[schedule]
    update = done + 1
    if update <= warmup_steps:
        return update / warmup_steps
    first = max(1, warmup_steps)  # the last update at the peak
    progress = min(1.0, (update - first) / max(1, total_steps - first))
    return min_ratio + (1.0 - min_ratio) * shape(progress)


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}
