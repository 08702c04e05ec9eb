"""How far generation may run ahead of training: which groups may be leased, and which may wait while others train.

Versions are policy versions; a group trained on weights of version V whose oldest token is of
version v has staleness V - v, and that never exceeds max_staleness:
- admission: at most (max_staleness + 1) * groups_per_step groups are leased, ready or assigned at a time;
- consumption: oldest first, and a group that is not ready may be overtaken only while it can still be trained in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Outstanding(NamedTuple):
    """A group between its lease and its training. Thousands are made in a turn of the coordinator."""

    group: str  # its name
    # of its tokens once it is ready; until then of what is back and of the servers that still sample
    oldest_version: int
    is_ready: bool  # every sample is back


@dataclass(frozen=True)
class Choice:
    """What the next step trains on, or what it waits for."""

    groups: tuple[str, ...]  # names of those that the next step trains on, oldest first; empty: the learner has to wait
    awaited: tuple[str, ...] = ()  # names of the groups that it waits for


class StalenessWindow:
    """Example: groups_per_step=2 and max_staleness=1 keep four groups outstanding.

    >>> window = StalenessWindow(groups_per_step=2, max_staleness=1)
    >>> window.num_free(num_outstanding=3)
    1
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.size = (max_staleness + 1) * groups_per_step

    def num_free(self, num_outstanding: int) -> int:
        """Return how many groups may be leased now."""
        return max(0, self.size - num_outstanding)

    def is_too_old(self, oldest_version: int, policy_version: int) -> bool:
        """Return whether a group could not be trained on weights of this version any more."""
        return policy_version - oldest_version > self.max_staleness

    def choose(self, outstanding: Sequence[Outstanding], policy_version: int, stale_policy: str) -> Choice:
        """Return the oldest ready groups for a step on weights of `policy_version`, or the groups to wait for.

        outstanding: in lease order, none of them too old. It waits when fewer than groups_per_step are ready and, with
        stale_policy "wait", when overtaking a group that is not ready would leave more groups with a deadline than
        steps to train them in. With "drop" the overtaken group may grow too old; its prompt then goes out again.
        """
        by_age = sorted(outstanding, key=lambda g: g.oldest_version)
        ready = [g for g in by_age if g.is_ready]
        chosen = ready[: self.groups_per_step]
        if len(chosen) < self.groups_per_step:
            return Choice((), tuple(g.group for g in by_age if not g.is_ready))
        if stale_policy == "drop":
            return Choice(tuple(g.group for g in chosen))
        taken = {g.group for g in chosen}
        left = [g for g in by_age if g.group not in taken]
        for place, group in enumerate(left):
            # Earliest deadline first: the group at this place is trained `place // groups_per_step + 1` steps from now.
            staleness = policy_version + place // self.groups_per_step + 1 - group.oldest_version
            if staleness > self.max_staleness:
                awaited = tuple(g.group for g in left[: place + 1] if not g.is_ready)
                if awaited:
                    return Choice((), awaited)
        return Choice(tuple(g.group for g in chosen))
