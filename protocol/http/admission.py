"""Admission to a service: a limited number of running requests. Others get 503 before their body is read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.responses import JSONResponse

from protocol.http.bearer import App, Receive, Scope, Send


class Admission:
    """Counts running requests. For one event loop."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.num_running = 0

    @property
    def is_full(self) -> bool:
        """Whether one more request should be refused."""
        return self.num_running >= self._max_requests

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block as a running request."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


class AdmissionMiddleware:
    """ASGI middleware: 503 to requests of one path while the service is full."""

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
        if scope["type"] == "http" and scope["path"] == self._path and self._admission.is_full:
            self._count()
            await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)
