"""How much memory each kind of process has gained since some age: the leak for which no test is long enough."""

from collections.abc import Callable, Mapping, Sequence

import psutil

_EVERY_S = 10.0


class MemoryGrowth:
    """Resident memory by process; one that was started anew counts anew."""

    def __init__(self, begins_s: float) -> None:
        """begins_s: age in seconds up to which a process may still grow: it loads, compiles and fills its caches."""
        self._begins_s = begins_s
        self._taken_at = float("-inf")
        # (pid, start time) -> kind, and bytes at that age and at last
        self._first: dict[tuple[int, float], tuple[str, int]] = {}
        self._last: dict[tuple[int, float], int] = {}
        self._seen_at: dict[tuple[int, float], float] = {}

    def take(self, now: float, find: Callable[[], Mapping[str, Sequence[psutil.Process]]]) -> None:
        """Note what there is, every ten seconds. now: seconds."""
        if now - self._taken_at < _EVERY_S:
            return
        self._taken_at = now
        for kind, found in find().items():
            for process in found:
                try:
                    key, size = (process.pid, process.create_time()), process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
                if size and now - self._seen_at.setdefault(key, now) >= self._begins_s:  # 0: it has ended, unburied
                    self._first.setdefault(key, (kind, size))
                    self._last[key] = size

    def grown(self) -> dict[str, tuple[int, int]]:
        """Return for each kind the bytes before and after of its process that grew most."""
        most: dict[str, tuple[int, int]] = {}
        for key, (kind, before) in self._first.items():
            after = self._last[key]
            if kind not in most or after / before > most[kind][1] / most[kind][0]:
                most[kind] = (before, after)
        return most
