"""The source of training groups: unfinished groups of an earlier start, then the prompt order.

It ends when it has returned as many groups as the remaining steps need.
"""

from collections import deque
from collections.abc import Callable, Sequence

from learner.coordinator.groups.group import Group
from learner.data.prompt_order import USUAL_ORDER, order_name, order_of
from learner.data.prompt_set import find_prompts, prompts_digest, rows_by_entry, rows_digest, uid_at
from learner.data.prompts import GroupName, Prompt
from learner.ledger.ledger import Ledger
from protocol.errors import SettingsError
from protocol.settings.data import in_words
from protocol.settings.settings import Settings

_MAX_LEFT_OUT = 1000  # prompts left out in a row, after which the next one is drawn anyway
_PASSES_AT_ONCE = 1000  # prompts left out before `take` returns None, so that a turn of the loop stays short


def claim_prompts(ledger: Ledger, settings: Settings, train: Sequence[Prompt]) -> None:
    """Raise SettingsError when the run began with other prompts or another order, which its accounts are about."""
    if not train:
        return
    has_begun = ledger.meta("claim:prompts") is not None
    if ledger.claim("prompts", prompts_digest(train)) is not None:
        raise SettingsError(
            f"settings: data.train = {in_words(settings.data.train)} holds other prompts than this run began with, or "
            "the same in another order. Put the earlier rows back, and the settings that form a prompt "
            f"(data.template, data.system_prompt, data.apply_chat_template), or {_anew(settings)}."
        )
    if ledger.claim("rows", rows_digest(train)) is not None:
        raise SettingsError(
            f"settings: data.train = {in_words(settings.data.train)} holds this run's prompts and labels, and other "
            "values in other columns, which rewards and environments read. Put the earlier file back, or "
            f"{_anew(settings)}."
        )
    if (seed := ledger.claim("seed", str(settings.run.seed))) is not None:
        raise SettingsError(
            f"settings: run.seed = {settings.run.seed}, and this run began with {seed}, which orders its prompts. "
            f"Set run.seed to {seed}, or {_anew(settings)}."
        )
    if has_begun and ledger.meta("claim:order") is None:
        ledger.claim("order", USUAL_ORDER)  # begun by a version that had no other order
    given = order_name(rows_by_entry(train), settings.data.weights(), settings.data.shuffle)
    if (order := ledger.claim("order", given)) is not None:
        raise SettingsError(
            f"settings: data.train's weights and data.shuffle give the order {given!r}, and this run began with "
            f"{order!r}. Put them back, or {_anew(settings)}."
        )


def _anew(settings: Settings) -> str:
    """Return what begins another run."""
    resume = settings.run.resume
    if resume in ("auto", "never"):
        return "choose another run.name"
    return f"begin with its weights: set policy.model to {resume}/model, without run.resume"


class PromptSource:
    """Its position in the prompt order is in the ledger, so a resumed run continues where the checkpoint was made.

    Example: with max_steps=3, groups_per_step=2 and last_step=1, `take` returns four groups and then None.
    """

    def __init__(self, train: Sequence[Prompt], settings: Settings, ledger: Ledger, last_step: int) -> None:
        # (uid, epoch) -> why the prompt is not drawn in the epoch, or None: set by `Curriculum.attach`
        self.reason_to_leave_out: Callable[[str, int], str | None] | None = None
        self.num_prompts = len(train)
        self._num_passes = _PASSES_AT_ONCE
        self._num_left_out = 0  # prompts left out since one was drawn
        self._train = train
        self._ledger = ledger
        self._group_size = settings.rollout.group_size
        data = settings.data
        self._order = order_of(rows_by_entry(train), data.weights(), settings.run.seed, data.shuffle)
        self._position = int(ledger.meta("position") or 0)
        self._unfinished = deque(ledger.recall_unfinished())
        self._by_uid = find_prompts(train, [old.uid for old in self._unfinished])
        self._num_left = (settings.run.max_steps - last_step) * settings.learner.groups_per_step

    def take(self) -> Group | None:
        """Return the next group; None when the run needs no more, or after many prompts that are left out."""
        if self._num_left <= 0:
            return None
        group = self._next_unfinished() or self._admit()
        self._num_left -= group is not None
        return group

    def another(self, position: int) -> Prompt:
        """Return a prompt near a position in the order that is another one. Every start returns the same."""
        own, distance = self._order.at(position)[1], 0
        while True:
            distance += 1
            for place in (position - distance, position + distance):
                if place >= 0 and (index := self._order.at(place)[1]) != own:
                    return self._train[index]

    def recall(self, limit: int) -> list[Group]:
        """Return up to `limit` unfinished groups of an earlier start; `take` returns the others."""
        groups: list[Group] = []
        while self._unfinished and len(groups) < limit and self._num_left > 0:
            if (group := self._next_unfinished()) is not None:
                groups.append(group)
                self._num_left -= 1
        return groups

    def replace_skipped(self) -> None:
        """Return one more group in place of a skipped one: every step still needs its groups."""
        self._num_left += 1

    def _next_unfinished(self) -> Group | None:
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

    def _admit(self) -> Group | None:
        """Return the group of the next prompt that is drawn in its epoch; None after many that are left out."""
        if self.reason_to_leave_out is not None and not self._leave_out(self.reason_to_leave_out):
            return None
        self._num_left_out = 0
        position = self._position
        epoch, index = self._order.at(position)
        self._position += 1
        self._ledger.set_meta("position", str(self._position))
        prompt = self._train[index]
        return Group(str(GroupName("train", epoch, prompt.uid)), prompt, "train", epoch, position, self._group_size)

    def _leave_out(self, reason_of: Callable[[str, int], str | None]) -> bool:
        """Pass the prompts that are not drawn; False after _PASSES_AT_ONCE, and the next call continues.

        After _MAX_LEFT_OUT in a row, or all prompts, the next prompt is drawn anyway.
        """
        while self._num_left_out < min(_MAX_LEFT_OUT, len(self._train)):
            epoch, index = self._order.at(self._position)
            uid = uid_at(self._train, index)
            reason = reason_of(uid, epoch)
            if reason is None:
                return True
            if self._num_passes == 0:
                self._num_passes = _PASSES_AT_ONCE
                return False
            self._num_passes -= 1
            self._num_left_out += 1
            self._ledger.add_skipped(str(GroupName("train", epoch, uid)), epoch, uid, self._position, reason)
            self._position += 1
            self._ledger.set_meta("position", str(self._position))
        return True
