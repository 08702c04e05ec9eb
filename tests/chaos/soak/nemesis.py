"""Faults of a cluster with real processes: each has a name, is begun, and is ended some seconds later by itself.

A kill is over at once. A process that is stopped goes on after the fault's seconds; others end as they say.
"""

import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.chaos.soak.processes import signal_if_there

_STOPPED_S = (3.0, 20.0)

Find = Callable[[], Mapping[str, list[psutil.Process]]]


@dataclass(frozen=True)
class Lasting:
    """A fault of something else than a process, such as a disk."""

    begin: Callable[[], None]
    end: Callable[[], None]
    lasts_s: float


@dataclass
class _InForce:
    ends_at: float  # seconds of the clock that `Nemesis.poll` is given
    end: Callable[[], None]


class Nemesis:
    """Draws faults at random moments; one at a time of those that last. Call `poll` a few times a second."""

    def __init__(
        self,
        find: Find,
        names: Sequence[str],
        others: Mapping[str, Lasting],
        draw: random.Random,
        pause_s: tuple[float, float],
    ) -> None:
        """find: the processes that there are, by kind. names: `kill KIND` and `stop KIND`. others: by name.

        pause_s: shortest and longest time between faults.
        """
        self.begun: Counter[str] = Counter()
        self.kinds = sorted([*names, *others])
        self._find = find
        self._others = others
        self._draw = draw
        self._pause_s = pause_s
        self._fault: _InForce | None = None
        self._next_at: float | None = None
        self._left: list[str] = []

    @property
    def unmet(self) -> list[str]:
        """Return the faults that have not come, or for which nothing was found."""
        return [name for name in self.kinds if not self.begun[name]]

    def poll(self, now: float) -> str | None:
        """Begin or end what is due; returns the name of a fault that has begun. now: seconds."""
        if self._fault is not None:
            if now >= self._fault.ends_at:
                self.rest()
            return None
        if self._next_at is None:
            self._next_at = now + self._draw.uniform(*self._pause_s)
        if now < self._next_at:
            return None
        # Each kind once before one comes again: a soak of minutes has met them all.
        self._left = self._left or self._draw.sample(self.kinds, len(self.kinds))
        name = self._left.pop()
        if not self._begin(name, now):
            return None  # there is none of that kind now: the next one is tried
        self._next_at = now + self._draw.uniform(*self._pause_s)
        self.begun[name] += 1
        return name

    def rest(self) -> None:
        """End the fault that is in force."""
        if self._fault is not None:
            self._fault.end()
            self._fault = None

    def _begin(self, name: str, now: float) -> bool:
        """Return whether there was something to do it to."""
        if (other := self._others.get(name)) is not None:
            other.begin()
            self._fault = _InForce(now + other.lasts_s, other.end)
            return True
        verb, kind = name.split()
        found = self._find().get(kind, [])
        if not found:
            return False
        victim = self._draw.choice(sorted(found, key=lambda process: process.pid))
        if not signal_if_there(victim, signal.SIGKILL if verb == "kill" else signal.SIGSTOP):
            return False
        if verb == "stop":
            self._fault = _InForce(now + self._draw.uniform(*_STOPPED_S), lambda: _go_on(victim))
        return True


def _go_on(process: psutil.Process) -> None:
    """Have it go on, and what it was begun by: nsenter stops with its child, and would never tell of its end."""
    signal_if_there(process, signal.SIGCONT)
    with suppress(psutil.NoSuchProcess):
        parent = process.parent()
        if parent is not None and parent.status() == psutil.STATUS_STOPPED:
            signal_if_there(parent, signal.SIGCONT)
