"""Dynamic sampling: a group is of use when its mean score lies strictly between two bounds; others are replaced.

A group that every sample solved, or none did, has no sample that was better than another.
Source: DAPO, arXiv:2503.14476, section 3.2.
"""

from collections import Counter
from typing import Literal, NamedTuple

from learner.coordinator.groups.group import Group
from learner.data.filtered import FILTERED, KEPT, OutsideBounds, mean_score
from protocol.errors import OperatorError
from protocol.settings.evaluation import FilterSettings

# The part of a reward that an environment gave: one that gives nothing gave 0.
_ENVIRONMENT = "environment"


class Verdict(NamedTuple):
    """What becomes of a group that is back whole."""

    is_kept: bool  # False: it is not trained, another prompt takes its slot
    reason: str | None = None  # for the ledger; None: it is kept because its score says something


_KEPT = Verdict(is_kept=True)


class ScoreFilter:
    """Counts what was filtered since the last step took its groups.

    limit_reason: why the run is to end, once more groups were filtered than filter.max_replaced allows.
    """

    def __init__(self, settings: FilterSettings, groups_per_step: int) -> None:
        self.is_on = settings.dynamic_sampling
        self.limit_reason: str | None = None
        self._settings = settings
        self._limit = settings.max_replaced * groups_per_step
        self._counts: Counter[Literal["low", "high"]] = Counter()

    def judge(self, group: Group) -> Verdict:
        """Return whether a whole group is trained. Raises: OperatorError when its rewards have no such part."""
        if not self.is_on:
            return _KEPT
        settings = self._settings
        mean = mean_score([self._score(group, index) for index in range(group.num_samples)])
        if settings.low < mean < settings.high:
            return _KEPT
        why = OutsideBounds(settings.score, mean, settings.low, settings.high)
        if self._limit and self._counts.total() >= self._limit:
            if settings.at_limit == "keep":
                return Verdict(True, f"{KEPT}{why}; {self._limit} groups were filtered before it")
            self.limit_reason = self.limit_reason or (
                f"{self._limit} groups were filtered before one step (filter.max_replaced = {settings.max_replaced}): "
                f"{self._counts['low']} had a mean {settings.score} of {settings.low:g} or less, "
                f"{self._counts['high']} of {settings.high:g} or more. Use prompts of another difficulty, "
                "widen filter.low and filter.high, "
                "raise filter.max_replaced, or set filter.at_limit to keep."
            )
        self._counts["low" if mean <= settings.low else "high"] += 1
        return Verdict(False, f"{FILTERED}{why}")

    def take_counts(self) -> dict[str, float]:
        """Return how many groups were filtered since this was last asked, too hard and too easy; {} when it is off."""
        counts, self._counts = self._counts, Counter()
        return {f"filtered_{side}": counts[side] for side in ("low", "high")} if self.is_on else {}

    def _score(self, group: Group, index: int) -> float:
        facts = group.trajectories[index].facts
        name = self._settings.score
        if name == "reward":
            return facts.reward if facts.reward_score is None else facts.reward_score
        if name in facts.reward_parts or name == _ENVIRONMENT:
            return facts.reward_parts.get(name, 0.0)
        raise OperatorError(
            f"filter.score = {name} is no part of the reward of {facts.group}, which has "
            f"{', '.join(sorted(facts.reward_parts)) or 'none'}. Set filter.score to reward or to one of these."
        )
