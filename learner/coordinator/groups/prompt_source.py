"""Where the next training group comes from: what an earlier start left unfinished, then the prompt order.

It ends when as many groups went out as the remaining steps need.
"""

from collections import deque
from collections.abc import Sequence

from learner.coordinator.groups.curriculum import Curriculum
from learner.coordinator.groups.group import Group
from learner.data.names import GroupName
from learner.data.prompt_order import order_of
from learner.data.prompt_set import find_prompts, rows_by_entry, uid_at
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from protocol.settings.settings import Settings

# Of one turn of the coordinator's loop: servers wait for its answers meanwhile.
_MAX_LEFT_OUT = 1000


class PromptSource:
    """Its place in the prompt order is in the ledger, so a resumed run goes on where the checkpoint was made.

    Example: with max_steps=3, groups_per_step=2 and last_step=1, `take` returns four groups and then None.
    """

    def __init__(self, train: Sequence[Prompt], settings: Settings, ledger: Ledger, last_step: int) -> None:
        self._train = train
        self._ledger = ledger
        self._group_size = settings.rollout.group_size
        data = settings.data
        self._order = order_of(rows_by_entry(train), data.weights(), settings.run.seed, data.shuffle)
        self._curriculum = Curriculum(settings, ledger)
        self._position = int(ledger.meta("position") or 0)
        self._unfinished = deque(ledger.recall_unfinished())
        self._by_uid = find_prompts(train, [old.uid for old in self._unfinished])
        self._num_left = (settings.run.max_steps - last_step) * settings.learner.groups_per_step

    @property
    def num_prompts(self) -> int:
        return len(self._train)

    def take(self) -> Group | None:
        """Return the next group, or None when the run needs no other."""
        if self._num_left <= 0:
            return None
        self._num_left -= 1
        return self._next_unfinished() or self._admit()

    def recall(self, limit: int) -> list[Group]:
        """Return what an earlier start left unfinished, at most `limit` groups; `take` gives the others."""
        groups: list[Group] = []
        while self._unfinished and len(groups) < min(limit, self._num_left + len(groups)):
            if (group := self._next_unfinished()) is not None:
                groups.append(group)
                self._num_left -= 1
        return groups

    def replace_skipped(self) -> None:
        """Let one more prompt out, for one that was given up: every step still needs its groups."""
        self._num_left += 1

    def _next_unfinished(self) -> Group | None:
        """Return a prompt that was out when the run stopped, if one is left that the data set still holds."""
        while self._unfinished:
            old = self._unfinished.popleft()
            prompt = self._by_uid.get(old.uid)
            if prompt is None:
                self._ledger.set_state([old.group], "skipped", reason="the data set no longer holds this prompt")
                continue
            group = Group(old.group, prompt, "train", old.epoch, old.position, self._group_size, attempt=old.attempt)
            group.failures.update(old.failures)
            return group
        return None

    def take_counts(self) -> dict[str, float]:
        """Return how many prompts the curriculum left out since this was last asked, easy and hard; {} when off."""
        return self._curriculum.take_counts()

    def _admit(self) -> Group:
        """Return the group of the next prompt that is drawn in its epoch."""
        if self._curriculum.is_on:
            self._leave_out()
        position = self._position
        epoch, index = self._order.at(position)
        self._position += 1
        self._ledger.set_meta("position", str(self._position))
        prompt = self._train[index]
        return Group(str(GroupName("train", epoch, prompt.uid)), prompt, "train", epoch, position, self._group_size)

    def _leave_out(self) -> None:
        """Go past the prompts that the curriculum does not draw. After so many in a row the next is drawn anyway."""
        for _ in range(min(_MAX_LEFT_OUT, len(self._train))):
            epoch, index = self._order.at(self._position)
            uid = uid_at(self._train, index)
            reason = self._curriculum.rests(uid, epoch)
            if reason is None:
                return
            self._ledger.rest(str(GroupName("train", epoch, uid)), epoch, uid, self._position, reason)
            self._position += 1
