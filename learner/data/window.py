"""The staleness window: the number of open groups, and each step's ready groups.

A group trained on policy version V whose oldest token is of version v has staleness V - v, at most max_staleness:
- admission: at most (max_staleness + 1) * groups_per_step groups are leased, ready or assigned;
- consumption: oldest first; an unready group is overtaken only while it can still be trained in time. A step may take
  its groups in parts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple


class Outstanding(NamedTuple):
    """An open training group. A NamedTuple: the coordinator makes thousands in one turn."""

    group: str
    oldest_version: int  # oldest policy version of its samples and of servers that still make some
    is_ready: bool  # all samples are back


_VERSION = itemgetter(1)  # oldest_version; faster than an attribute
# Largest number of parts of a step, unless its last groups come one by one: each has a micro-batch on every rank.
_MAX_PARTS = 8


@dataclass(frozen=True)
class Choice:
    """The groups of the next step, or the groups that it waits for."""

    groups: tuple[str, ...]  # names, oldest first; empty: the learner waits
    awaited: tuple[str, ...] = ()  # names of groups to wait for


class StalenessWindow:
    """Example: with two groups per step and staleness 1, four groups may be open (`size`)."""

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.size = (max_staleness + 1) * groups_per_step

    def is_too_old(self, oldest_version: int, policy_version: int) -> bool:
        """Return whether a group is too old for weights of this version."""
        return policy_version - oldest_version > self.max_staleness

    def fewest(self, num_taken: int, *, in_parts: bool) -> int:
        """Return how many groups must be ready for a step, or for its next part. num_taken: groups that it has."""
        lacking = self.groups_per_step - num_taken
        return min(lacking, -(-self.groups_per_step // _MAX_PARTS)) if in_parts else lacking

    def choose(
        self,
        outstanding: Sequence[Outstanding],
        policy_version: int,
        stale_policy: str,
        num_taken: int = 0,
        fewest: int | None = None,
    ) -> Choice:
        """Return the oldest ready groups for a step, or the groups to wait for.

        outstanding: in lease order, without too old groups and groups of a step. num_taken: groups that the step has.
        fewest: the step takes a part of at least so many groups; None: all that it lacks.
        The step waits when fewer are ready and, with stale_policy "wait", when overtaking an unready group would leave
        more groups with a deadline than places in steps for them. With "drop" the overtaken group may become too old
        and is made again.
        """
        lacking = self.groups_per_step - num_taken
        by_age = sorted(outstanding, key=_VERSION)
        ready = [g for g in by_age if g.is_ready]
        chosen = ready[:lacking]
        if len(chosen) < (lacking if fewest is None else min(fewest, lacking)):
            return Choice((), tuple(g.group for g in by_age if not g.is_ready))
        if stale_policy == "drop":
            return Choice(tuple(g.group for g in chosen))
        taken = {g.group for g in chosen}
        left = [g for g in by_age if g.group not in taken]
        first_unready = next((place for place, group in enumerate(left) if not group.is_ready), len(left))
        free, end = lacking - len(chosen), 0  # free: places in this step
        for oldest_version, count in Counter(map(_VERSION, left)).items():  # earliest deadline first
            start, end = end, end + count
            # Groups of this version at this place and behind it would be trained too late.
            late = free + (self.max_staleness - (policy_version - oldest_version)) * self.groups_per_step
            place = max(late, start, first_unready)
            if place < end:
                return Choice((), tuple(g.group for g in left[: place + 1] if not g.is_ready))
        return Choice(tuple(g.group for g in chosen))
