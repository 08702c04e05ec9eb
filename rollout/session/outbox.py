"""Finished and failed samples until the coordinator no longer needs them, and the counts of failures.

The states of an item:

    waiting --due--> sent --Ack accepted--> kept --GroupsTrained--> gone a trajectory for training
                     sent --any other Ack--> gone                        evaluation, failure, duplicate, unknown
                     sent --no Ack in time--> sent again

A restarted learner receives the kept items again. An item that is not trained after `keep_s` is offered again: the
coordinator answers "duplicate" if it still has it, and "unknown" if its prompt was skipped.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from protocol.one_line import one_line
from protocol.wire.messages import Outcome
from protocol.wire.trajectory import Trajectory

_WARN_EVERY_S = 60.0
# A heartbeat carries 256 names; an environment chooses its own names.
_MAX_NAMES = 250
_OTHERS = "others"


class Key(NamedTuple):
    """An attempt at a sample. Equal keys are one item."""

    group: str
    sample_index: int
    incarnation: int  # run's start that gave the lease
    attempt: int  # leases of the group so far


@dataclass(frozen=True)
class Failure:
    """A failed sample."""

    key: Key
    boundary: str
    detail: str
    num_model_tokens: int = 0  # tokens of the turns that the policy had finished
    place: str = ""  # file and line of the user's code that raised


@dataclass(frozen=True)
class FinishedSample:
    """A finished sample."""

    key: Key
    trajectory: Trajectory


Item = FinishedSample | Failure


class Outbox:
    """Items by key. Callers pass the time in monotonic seconds."""

    def __init__(self, resend_s: float = 5.0, keep_s: float = 120.0) -> None:
        self._resend_s = resend_s
        self._keep_s = keep_s
        self._items: dict[Key, Item] = {}
        # Both are sorted by time, oldest first: `due` looks at the front only.
        self._waiting: dict[Key, None] = {}
        self._sent_at: dict[Key, float] = {}
        self._kept_at: dict[Key, float] = {}
        self._by_group: dict[str, set[Key]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: Key) -> bool:
        return key in self._items

    def unanswered_keys(self) -> Iterator[Key]:
        """Yield the keys of items without an answer of the coordinator."""
        yield from self._waiting
        yield from self._sent_at

    def put(self, item: Item) -> bool:
        """Add an item to send; return False if its key is known."""
        if item.key in self._items:
            return False
        self._items[item.key] = item
        self._waiting[item.key] = None
        self._by_group.setdefault(item.key.group, set()).add(item.key)
        return True

    def due(self, now: float) -> list[Item]:
        """Return the items to send now, and mark them as sent."""
        to_send = [*self._waiting, *_older(self._sent_at, now - self._resend_s)]
        to_offer = _older(self._kept_at, now - self._keep_s)
        self._waiting.clear()
        for key in to_send:
            self._sent_at.pop(key, None)
            self._sent_at[key] = now
        for key in to_offer:
            del self._kept_at[key]
            self._kept_at[key] = now
        return [self._items[key] for key in (*to_send, *to_offer)]

    def acknowledge(self, group: str, sample_index: int, outcome: Outcome) -> None:
        """Apply the coordinator's answer to all sent attempts at a sample."""
        for key in [key for key in self._by_group.get(group, ()) if key.sample_index == sample_index]:
            if key in self._waiting:
                continue
            if outcome == "accepted" and _is_for_training(self._items[key]):
                self._keep(key)
            elif outcome != "duplicate" or key not in self._kept_at:
                self._forget(key)

    def mark_trained(self, groups: Iterable[str]) -> None:
        """Forget the items of groups that are trained or skipped."""
        for group in groups:
            for key in list(self._by_group.get(group, ())):
                self._forget(key)

    def send_all_again(self) -> None:
        """Mark all items as unsent, for a coordinator that knows no item."""
        self._waiting = dict.fromkeys(self._items)
        self._sent_at.clear()
        self._kept_at.clear()

    def _keep(self, key: Key) -> None:
        sent_at = self._sent_at.pop(key, None)
        if sent_at is not None:
            self._kept_at[key] = sent_at

    def _forget(self, key: Key) -> None:
        del self._items[key]
        self._waiting.pop(key, None)
        self._sent_at.pop(key, None)
        self._kept_at.pop(key, None)
        keys = self._by_group[key.group]
        keys.discard(key)
        if not keys:
            del self._by_group[key.group]


def _is_for_training(item: Item) -> bool:
    return isinstance(item, FinishedSample) and item.trajectory.facts.kind == "train"


def _older(times: dict[Key, float], limit: float) -> list[Key]:
    return [key for key, _ in takewhile(lambda entry: entry[1] <= limit, times.items())]


class FailureCounts:
    """Failure counts since the run attached. A boundary's first failure is logged at once, then one line a minute."""

    def __init__(self, log: logging.Logger, server: str, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self.totals: Counter[str] = Counter()
        self._log = log
        self._clock = clock
        self._server = server
        self._unlogged: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def add(self, boundary: str, detail: str, consequence: str, error: BaseException | None = None) -> None:
        """Count one failure.

        consequence: effect of one failure. error: logged with its traceback; only an exception of this process's code.
        """
        if boundary not in self.totals and len(self.totals) >= _MAX_NAMES:
            boundary = _OTHERS
        self.totals[boundary] += 1
        self._unlogged[boundary] += 1
        now = self._clock()
        since_s = now - self._logged_at.get(boundary, -_WARN_EVERY_S)
        if since_s < _WARN_EVERY_S:
            return
        count, self._unlogged[boundary], self._logged_at[boundary] = self._unlogged[boundary], 0, now
        self._log.warning(
            '%s  %s failed  count=%d last="%s" consequence="%s"',
            self._server,
            boundary,
            count,
            one_line(detail, 1000),
            consequence,
            exc_info=error,
        )
