"""Admission to a service: a limited number of requests, which it can answer within a bounded wait. Others get 503."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.responses import JSONResponse

from protocol.http.bearer import App, Receive, Scope, Send

# Answers in the measured rate: an answer's weight halves with every 90 later ones.
_ANSWERS = 128
# Below this many requests none is refused for its wait: the rate of few requests predicts nothing.
_FEW = 16


class Admission:
    """Counts running requests and measures the rate of answers. For one event loop."""

    def __init__(self, max_requests: int, max_wait_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """max_requests: limit of running requests. max_wait_s: longest expected wait of an admitted request."""
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._clock = clock
        self.num_running = 0
        self._since = 0.0  # time of the last answer, or of the end of idleness
        self._busy_s = 0.0  # decays with each answer, as the number of answers does
        self._num_answers = 0.0

    def is_full(self) -> bool:
        """Return whether one more request should be refused."""
        number = self.num_running
        return number >= self._max_requests or (number >= _FEW and number * self.answer_s > self._max_wait_s)

    @property
    def answer_s(self) -> float:
        """Busy seconds per recent answer, with all other work of the process; 0: no answer yet.

        Example: 64 requests that were answered together after 0.2 s: 0.003.
        """
        return self._busy_s / self._num_answers if self._num_answers else 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block as a running request, and as an answer unless it raises."""
        if not self.num_running:
            self._since = self._clock()
        self.num_running += 1
        try:
            yield
            self._note_answer()
        finally:
            self.num_running -= 1

    def _note_answer(self) -> None:
        now = self._clock()
        decay = 1 - 1 / _ANSWERS
        self._busy_s = self._busy_s * decay + now - self._since
        self._num_answers = self._num_answers * decay + 1
        self._since = now


class AdmissionMiddleware:
    """ASGI middleware: 503 to requests of one path while the service is full, before their body is read."""

    def __init__(
        self, app: App, path: str, admission: Admission, detail: str, retry_after_s: int, count: Callable[[], None]
    ) -> None:
        """detail: the reason in the answer. count: called for each 503."""
        self._app = app
        self._path = path
        self._admission = admission
        self._answer = JSONResponse({"detail": detail}, 503, {"retry-after": str(retry_after_s)})
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._path and self._admission.is_full():
            self._count()
            await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)
