"""Which trajectories of a step are recorded with their tokens: coordinator and ranks choose the same ones."""

from collections.abc import Sequence

from protocol.settings.settings import Settings
from protocol.wire.trajectory import TrajectoryFacts

_NUM_GROUPS = 20  # whole groups that a run records


def group_every(settings: Settings) -> int:
    """Return the number of steps from one recorded whole group to the next."""
    return max(1, settings.run.max_steps // _NUM_GROUPS)


def recorded_indices(
    facts: Sequence[TrajectoryFacts], step: int, num: int, every: int, first: int = 0, total: int | None = None
) -> list[int]:
    """Return the places of the recorded trajectories among these of a step, in order.

    num: report.samples_per_step, spread over the step. every: in the first step, and in each step that it divides, the
    step's first group is recorded too; 0: never. first, total: of a part of a step, the number of trajectories in
    earlier parts, and in all.
    Example: of 8 trajectories in groups of 2, num 2 gives 0 and 4, and in the first step 0, 1 and 4.
    """
    if not num:
        return []
    total = len(facts) if total is None else total
    chosen = {place - first for place in range(0, total, max(1, total // num))[:num]}
    if every and (step == 1 or step % every == 0) and not first:
        chosen |= {i for i, each in enumerate(facts) if each.group == facts[0].group}
    return sorted(i for i in chosen if 0 <= i < len(facts))
