"""Prompts that are drawn less often: easy and hard ones, by the mean score that they had when they were drawn last.

What it goes by is in the ledger: a restart and a resume know what an uninterrupted run knows.
"""

from learner.data.filtered import RESTED, Rested, mean_score
from learner.data.names import GroupName
from learner.ledger.ledger import Ledger
from protocol.settings.settings import Settings


class Curriculum:
    """Example: with easy = 1.0 and every = 4, a prompt that all samples solved in epoch 2 is drawn again in epoch 6.

    Counts what was not drawn since a step last took its groups.
    """

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings = settings.data.curriculum
        self._score = settings.filter.score
        self._group_size = settings.rollout.group_size
        self._ledger = ledger
        self._counts = {True: 0, False: 0}  # is easy -> how many

    @property
    def is_on(self) -> bool:
        return self._settings.is_on

    def rests(self, uid: str, epoch: int) -> str | None:
        """Return why a prompt is not drawn in an epoch; None when it is drawn."""
        for earlier in range(epoch - 1, max(epoch - self._settings.every, -1), -1):
            scores = self._ledger.scores_of(str(GroupName("train", earlier, uid)))
            if len(scores) == self._group_size:
                mean = mean_score(
                    [score if self._score == "reward" else parts.get(self._score, 0.0) for score, parts in scores]
                )
                return self._judge(mean, earlier)
        return None

    def take_counts(self) -> dict[str, float]:
        """Return how many prompts were not drawn since this was last asked; {} when it is off."""
        easy, hard = self._counts[True], self._counts[False]
        self._counts = {True: 0, False: 0}
        return {"curriculum_easy": easy, "curriculum_hard": hard} if self.is_on else {}

    def _judge(self, mean: float, epoch: int) -> str | None:
        easy, hard, every = self._settings.easy, self._settings.hard, self._settings.every
        if easy is not None and mean >= easy:
            self._counts[True] += 1
            return f"{RESTED}{Rested(self._score, mean, epoch, True, easy, every)}"
        if hard is not None and mean <= hard:
            self._counts[False] += 1
            return f"{RESTED}{Rested(self._score, mean, epoch, False, hard, every)}"
        return None
