"""What a server has finished and the coordinator may still need: sent, sent again, and forgotten in time.

An item is

    waiting --due--> sent --Ack accepted--> kept --Trained--> gone       a trajectory to train on
                     sent --any other Ack--> gone                        evaluation, failure, duplicate, unknown
                     sent --no Ack in time--> sent again

Kept ones are what a restarted learner can be given again. One that was not called trained for `keep_s` is offered
again: the coordinator answers "duplicate" when it still has it, and "unknown" when its prompt was given up.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from protocol.wire.messages import Outcome
from protocol.wire.trajectory import Trajectory


class Key(NamedTuple):
    """Which try at which sample; what came twice is one item."""

    group: str  # as in the lease
    sample_index: int  # as in the lease
    incarnation: int  # start of the run that gave the lease
    attempt: int  # of the lease: leases of the group so far


@dataclass(frozen=True)
class Failure:
    """A sample that could not be made."""

    key: Key  # which try at which sample
    boundary: str  # the neighbour that failed, as SampleFailed.boundary
    detail: str  # for people: what it said or did
    num_model_tokens: int = 0  # written by the policy until then, in turns that ended


@dataclass(frozen=True)
class Finished:
    """A sample that was made."""

    key: Key  # which try at which sample
    trajectory: Trajectory  # what was made, checked


Item = Finished | Failure


class Outbox:
    """Items by key. Times are monotonic seconds, given by the caller."""

    def __init__(self, resend_s: float = 5.0, keep_s: float = 120.0) -> None:
        self._resend_s = resend_s
        self._keep_s = keep_s
        self._items: dict[Key, Item] = {}
        # The times are in the order in which they were noted, oldest first: `due` looks at the front only.
        self._waiting: dict[Key, None] = {}
        self._sent_at: dict[Key, float] = {}
        self._kept_at: dict[Key, float] = {}
        self._by_group: dict[str, set[Key]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: Key) -> bool:
        return key in self._items

    @property
    def num_unanswered(self) -> int:
        """Items that the coordinator has not answered for."""
        return len(self._waiting) + len(self._sent_at)

    def unanswered(self) -> Iterator[Key]:
        """Yield the keys of items that the coordinator has not answered for."""
        yield from self._waiting
        yield from self._sent_at

    def put(self, item: Item) -> bool:
        """Take in an item to send; False when this very try is here already."""
        if item.key in self._items:
            return False
        self._items[item.key] = item
        self._waiting[item.key] = None
        self._by_group.setdefault(item.key.group, set()).add(item.key)
        return True

    def due(self, now: float) -> list[Item]:
        """Return what is to be sent now, and count it as sent."""
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
        """Note what the coordinator made of every try at this sample that was sent to it."""
        for key in [key for key in self._by_group.get(group, ()) if key.sample_index == sample_index]:
            if key in self._waiting:
                continue
            if outcome == "accepted" and _is_for_training(self._items[key]):
                self._keep(key)
            elif outcome != "duplicate" or key not in self._kept_at:
                self._forget(key)

    def mark_trained(self, groups: Iterable[str]) -> None:
        """Forget everything of groups that are accounted for, trained or skipped."""
        for group in groups:
            for key in list(self._by_group.get(group, ())):
                self._forget(key)

    def send_all_again(self) -> None:
        """Count everything as never sent, because a coordinator that knows none of it has taken over."""
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
    return isinstance(item, Finished) and item.trajectory.facts.kind == "train"


def _older(times: dict[Key, float], limit: float) -> list[Key]:
    return [key for key, _ in takewhile(lambda entry: entry[1] <= limit, times.items())]
