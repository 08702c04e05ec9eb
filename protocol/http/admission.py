"""How much a service takes on at a time: so many requests, and no more than it answers within a bounded wait."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# How many answers the measured rate is of: the weight of an older one halves every 90 answers.
_ANSWERS = 128
# So few requests are never turned away for their wait: one of them after another would tell little about many at once.
_FEW = 16


class Admission:
    """Counts requests under way and measures how fast they are answered; of one event loop."""

    def __init__(self, max_requests: int, max_wait_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """max_requests: under way at a time. max_wait_s: longest expected wait of a request that is taken on."""
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._clock = clock
        self.num_under_way = 0
        self._since = 0.0  # the last answer, or the end of idleness
        self._busy_s = 0.0  # both fade with each answer
        self._num_answers = 0.0

    def is_full(self, num_arriving: int = 0) -> bool:
        """Return whether one more request should come back later. num_arriving: taken on, and not under way yet."""
        number = self.num_under_way + num_arriving
        return number >= self._max_requests or (number >= _FEW and number * self.answer_s > self._max_wait_s)

    @property
    def answer_s(self) -> float:
        """Busy seconds for each of the last answers, together with all that the process did meanwhile; 0: none yet.

        Example: 64 requests that were answered together after 0.2 s: 0.003.
        """
        return self._busy_s / self._num_answers if self._num_answers else 0.0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count the block as a request under way, and as answered unless it raises."""
        if not self.num_under_way:
            self._since = self._clock()
        self.num_under_way += 1
        try:
            yield
            self._note_answer()
        finally:
            self.num_under_way -= 1

    def _note_answer(self) -> None:
        now = self._clock()
        fading = 1 - 1 / _ANSWERS
        self._busy_s = self._busy_s * fading + now - self._since
        self._num_answers = self._num_answers * fading + 1
        self._since = now
