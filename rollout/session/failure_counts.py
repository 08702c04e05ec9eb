"""Counts failures of neighbours by name, and warns of them without flooding the log."""

import logging
from collections import Counter

from protocol.one_line import one_line

_WARN_EVERY_S = 60.0
# A heartbeat carries 256 names; an environment may fail under any name it likes.
_MAX_NAMES = 250
_OTHERS = "others"


class FailureCounts:
    """Counts since the run attached. The first failure of a boundary is logged at once, then one line a minute."""

    def __init__(self, log: logging.Logger, server: str) -> None:
        self.totals: Counter[str] = Counter()
        self._log = log
        self._server = server
        self._unlogged: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def add(self, boundary: str, detail: str, consequence: str, now: float, error: BaseException | None = None) -> None:
        """Count one failure.

        consequence: what becomes of one of them. now: monotonic seconds. error: logged with its traceback; give one
        that code raised here, not one that tells of another process.
        """
        if boundary not in self.totals and len(self.totals) >= _MAX_NAMES:
            boundary = _OTHERS
        self.totals[boundary] += 1
        self._unlogged[boundary] += 1
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
