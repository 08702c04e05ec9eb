"""The learning rate of every optimizer step.

Called by `learner.policy` before each update. `done` counts updates already applied; a refused one does not advance it.
"""

import math
from collections.abc import Callable


def learning_rate(
    done: int, *, peak: float, warmup_steps: int, total_steps: int, min_ratio: float, schedule: str
) -> float:
    """Return the learning rate of the update that follows `done` applied ones.

    Linear from peak / warmup_steps to peak, then `schedule` down to min_ratio * peak at update total_steps, then flat.
    Example: peak 1, warmup_steps 2, total_steps 4, linear to 0 gives 0.5, 1.0, 0.5, 0.0.
    Raises: KeyError for a schedule that is not in SCHEDULES.
    """
    shape = SCHEDULES[schedule]
    update = done + 1
    if update <= warmup_steps:
        return peak * update / warmup_steps
    decay_steps = max(1, total_steps - max(1, warmup_steps))
    progress = min(1.0, (update - max(1, warmup_steps)) / decay_steps)
    return peak * (min_ratio + (1.0 - min_ratio) * shape(progress))


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}
