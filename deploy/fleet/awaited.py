"""What the fleet waits for, for whoever waits for the fleet: which server, to do what, for how long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHORT_S = 3.0


class Awaited:
    """clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[tuple[str, str], float] = {}  # (server, what it is to do) -> seconds of the clock

    @contextmanager
    def of(self, name: str, what: str) -> Iterator[None]:
        """Note within the block that this server is awaited. what: to do what, as it stands behind "to"."""
        self._since[name, what] = self._clock()
        try:
            yield
        finally:
            self._since.pop((name, what), None)

    def said(self) -> str:
        """Return the longest wait in words, and how many others there are; empty as long as all are short."""
        if not self._since:
            return ""
        (name, what), since = min(self._since.items(), key=lambda wait: wait[1])
        if (waited_s := self._clock() - since) < _SHORT_S:
            return ""
        others = f", and {len(self._since) - 1} more" if len(self._since) > 1 else ""
        return f"{name} to {what}, {waited_s:.0f} s{others}"
