"""Dynamic sampling: a group is trained when its mean score lies strictly between two bounds; others are replaced.

A group whose samples all succeeded or all failed gives no gradient.
Source: DAPO, arXiv:2503.14476, section 3.2.
"""

from collections import Counter
from typing import Literal

from learner.coordinator.accounts import Accounts
from learner.coordinator.groups.group import Group, mean_score
from learner.coordinator.groups.open_groups import OpenGroups
from learner.disk.run_folder import FILTERED, KEPT
from protocol.errors import OperatorError
from protocol.settings.settings import Settings

# The environment's part of a reward; a sample without this part has 0.
_ENVIRONMENT = "environment"
_OTHER_RANGE = (
    "A group with different scores was filtered, because scores are below 0 or above 1, as of verl's math_dapo: set "
    "filter.low and filter.high to the score of a wrong and of a right answer."
)


class ScoreFilter:
    """Counts the groups that were filtered since the last step took its groups."""

    def __init__(self, settings: Settings, groups: OpenGroups, accounts: Accounts) -> None:
        self._settings = settings.filter
        self._limit = settings.filter.max_replaced * settings.learner.groups_per_step
        self._groups = groups
        self._events, self._note = accounts.counts, accounts.streaks.note
        self._counts: Counter[Literal["low", "high"]] = Counter()

    def attach(self) -> None:
        """Judge every complete group from now on."""
        self._groups.on_ready.append(self.judge)
        self._groups.on_assigned.append(self.take_counts)

    def judge(self, group: Group) -> str | None:
        """Return the reason to skip a complete group; None when it is trained.

        A step's groups may be replaced filter.max_replaced times. Beyond that, filter.at_limit decides: the run ends,
        or the group is trained in spite of its mean.
        Raises: OperatorError when the group's rewards have no part filter.score.
        """
        settings = self._settings
        scores = [self._score(group, index) for index in range(group.num_samples)]
        mean = mean_score(scores)
        if settings.low < mean < settings.high:
            return None
        if min(scores) < max(scores) and (min(scores) < settings.low == 0.0 or max(scores) > settings.high == 1.0):
            self._note(_OTHER_RANGE)
        why = f"mean {settings.score} {mean!r} is not above {settings.low!r} and below {settings.high!r}"
        if self._limit and self._counts.total() >= self._limit:
            if settings.at_limit == "keep":
                group.kept_because = f"{KEPT}{why}; {self._limit} groups were filtered before it"
                return None
            self._groups.give_up_reason = self._groups.give_up_reason or self._limit_reason()
        self._counts["low" if mean <= settings.low else "high"] += 1
        self._events["filtered"] += 1
        return f"{FILTERED}{why}"

    def take_counts(self) -> dict[str, float]:
        """Return how many groups were filtered since the last call: too hard ("low") and too easy ("high")."""
        counts, self._counts = self._counts, Counter()
        return {f"data/filtered_{side}": counts[side] for side in ("low", "high")}

    def _limit_reason(self) -> str:
        settings = self._settings
        return (
            f"{self._limit} groups were filtered before one step (filter.max_replaced = {settings.max_replaced}): "
            f"{self._counts['low']} had a mean {settings.score} of {settings.low:g} or less, "
            f"{self._counts['high']} of {settings.high:g} or more. Use prompts of another difficulty, "
            "widen filter.low and filter.high, raise filter.max_replaced, or set filter.at_limit to keep."
        )

    def _score(self, group: Group, index: int) -> float:
        facts = group.trajectories[index].facts
        name = self._settings.score
        if name == "reward":
            return facts.reward if facts.reward_score is None else facts.reward_score
        if name in facts.reward_parts or name == _ENVIRONMENT:
            return facts.reward_parts.get(name, 0.0)
        raise OperatorError(
            f"filter.score = {name} is not a part of the reward of {facts.group}, which has "
            f"{', '.join(sorted(facts.reward_parts)) or 'no parts'}. Set filter.score to reward or to one of these."
        )
