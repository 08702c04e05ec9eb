"""Curriculum: easy and hard prompts are left out of some epochs, by their mean score of the last epoch that drew them.

The scores are in the ledger, so a resumed run leaves out the same prompts as an uninterrupted one.
"""

import re

from learner.coordinator.groups.group import mean_score
from learner.coordinator.groups.open_groups import OpenGroups
from learner.coordinator.groups.prompt_source import PromptSource
from learner.data.prompts import GroupName
from learner.disk.run_folder import LEFT_OUT
from learner.ledger.ledger import Ledger
from protocol.settings.settings import Settings

# In the reason of a prompt that was left out, as `Curriculum._judge` writes it.
_SCORED_EPOCH = re.compile(rf"{re.escape(LEFT_OUT)}mean \S+ \S+ in epoch (\d+) is ")


class Curriculum:
    """Example: with easy = 1.0 and every = 4, a prompt that all samples solved in epoch 2 is drawn again in epoch 6.

    Counts the prompts that were left out since the last step took its groups.
    """

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings = settings.data.curriculum
        self._score = settings.filter.score
        # Samples of a start without this endpoint say nothing about a prompt; one without the environment's part has 0.
        self._missing = 0.0 if self._score == "environment" else None
        self._group_size = settings.rollout.group_size
        self._ledger = ledger
        self._counts = {"easy": 0, "hard": 0}

    def attach(self, source: PromptSource, groups: OpenGroups) -> None:
        """Decide for every prompt of the source from now on."""
        source.reason_to_leave_out = self.reason_to_leave_out
        groups.on_assigned.append(self.take_counts)

    def reason_to_leave_out(self, uid: str, epoch: int) -> str | None:
        """Return why a prompt is not drawn in an epoch; None when it is drawn."""
        earlier = epoch - 1
        while earlier > max(epoch - self._settings.every, -1):
            name = str(GroupName("train", earlier, uid))
            if (stated := _SCORED_EPOCH.search(self._ledger.reason_of(name) or "")) is not None:
                earlier = int(stated[1])  # it was left out for the scores of that epoch: none are newer
                continue
            scores = self._ledger.scores_of(name)
            own = [
                score if self._score == "reward" else parts.get(self._score, self._missing) for score, parts in scores
            ]
            if len(own) == self._group_size and None not in own:
                return self._judge(mean_score([score for score in own if score is not None]), earlier)
            earlier -= 1
        return None

    def take_counts(self) -> dict[str, float]:
        """Return how many easy and hard prompts were left out since the last call."""
        counts, self._counts = self._counts, {"easy": 0, "hard": 0}
        return {f"data/curriculum_{kind}": number for kind, number in counts.items()}

    def _judge(self, mean: float, epoch: int) -> str | None:
        easy, hard = self._settings.easy, self._settings.hard
        if easy is not None and mean >= easy:
            kind, bound = "easy", f"at least {easy!r}"
        elif hard is not None and mean <= hard:
            kind, bound = "hard", f"at most {hard!r}"
        else:
            return None
        self._counts[kind] += 1
        every = self._settings.every
        return f"{LEFT_OUT}mean {self._score} {mean!r} in epoch {epoch} is {bound}, drawn every {every} epochs"
