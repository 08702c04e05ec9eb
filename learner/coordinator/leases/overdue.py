"""How long a lease may take before its group is leased a second time: learned from how long groups take.

A second lease is not a failure: the first one's samples count if they come first, so a long answer is never cut off by
what is usual.
"""

from collections import deque

_NUM_OBSERVED = 256
_NUM_NEEDED = 32
_MANY_TIMES = 4.0
_AT_LEAST_S = 30.0


class OverdueLimit:
    """Example: after groups that took 10 to 20 s, a lease is overdue after 80 s.

    >>> limit = OverdueLimit(limit_s=600.0)
    >>> for seconds in range(32):
    ...     limit.observe(10.0 + seconds % 11)
    >>> limit.overdue_s
    80.0
    """

    def __init__(self, limit_s: float) -> None:
        """limit_s: the most that a lease may take at all."""
        self.limit_s = limit_s
        self._durations: deque[float] = deque(maxlen=_NUM_OBSERVED)
        self.overdue_s = limit_s

    def observe(self, duration_s: float) -> None:
        """Take in how long a group took from its lease to its last sample."""
        self._durations.append(duration_s)
        if len(self._durations) >= _NUM_NEEDED:
            self.overdue_s = min(self.limit_s, max(_AT_LEAST_S, _MANY_TIMES * max(self._durations)))
