"""How much memory each kind of process has gained since some age: the leak for which no test is long enough.

Measured is resident memory, every ten seconds, from an age on: until then a process loads, compiles and fills caches. A
process has grown by what the median of its newest minute is above the median of its first one: an allocator gives pages
back and takes them again, so that single samples differ by more than a leak of minutes. A kind has grown by what all
its processes together have: what one of several gains by having got more of the work, the others do not.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import psutil

_EVERY_S = 10.0
_WINDOW = 6  # samples
_NUM_WINDOWS = 3  # with fewer of them between first and newest a process tells nothing of growth


class MemoryGrowth:
    """Resident memory by process; one that was started anew counts anew."""

    def __init__(self, begins_s: float) -> None:
        """begins_s: age in seconds up to which a process may still grow."""
        self._begins_s = begins_s
        self._taken_at = float("-inf")
        # (pid, start time) -> kind, and its samples in bytes
        self._samples: dict[tuple[int, float], tuple[str, list[int]]] = {}

    def take(self, now: float, find: Callable[[], Mapping[str, Sequence[psutil.Process]]]) -> None:
        """Note what there is, every ten seconds. now: seconds."""
        if now - self._taken_at < _EVERY_S:
            return
        self._taken_at = now
        for kind, found in find().items():
            for process in found:
                try:
                    self.note(kind, (process.pid, process.create_time()), process.memory_info().rss, time.time())
                except psutil.NoSuchProcess:
                    continue

    def note(self, kind: str, process: tuple[int, float], size: int, at_s: float) -> None:
        """Add one sample. process: its pid and when it began, in seconds since 1970, as at_s is."""
        if size and at_s - process[1] >= self._begins_s:  # 0: it has ended, unburied
            self._samples.setdefault(process, (kind, []))[1].append(size)

    def grown(self) -> dict[str, tuple[float, float]]:
        """Return for each kind the bytes before and after of those of its processes that were seen for long enough."""
        sums: dict[str, tuple[float, float]] = {}
        for kind, samples in self._samples.values():
            if len(samples) >= _WINDOW * _NUM_WINDOWS:
                before, after = sums.get(kind, (0.0, 0.0))
                sums[kind] = (before + median(samples[:_WINDOW]), after + median(samples[-_WINDOW:]))
        return sums


def say_growth(growth: MemoryGrowth) -> dict[str, float]:
    """Print each kind's memory before and after; returns the shares by which they grew."""
    for kind, (before, after) in sorted(growth.grown().items()):
        print(f"soak: memory of {kind}: {before / 1e6:.0f} MB, then {after / 1e6:.0f} MB")
    return {kind: after / before - 1.0 for kind, (before, after) in growth.grown().items()}
