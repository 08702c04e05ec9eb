"""503 for requests that a full service does not take on, decided before anything else is done for them.

Where many clients come back at once, what turns a request away must cost next to nothing, or those that were taken on
wait for it. A request that came whole is therefore answered from its bytes, a tenth of the time of an application's
answer; what the bytes do not say plainly goes the common way, and meets the same question there.
"""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from protocol.http.admission import Admission
from protocol.http.app import App, Receive, Scope, Send
from protocol.http.bearer import is_authorised

# In the state of a scope: this request has its place, and is not asked again.
_TAKEN_ON = "taken_on"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*(?=\r\n)", re.IGNORECASE)
_TOKEN = re.compile(rb"\r\nauthorization:[ \t]*([^\r\n]*)\r\n", re.IGNORECASE)
# What changes how a body is sent, or what the client wants of the connection.
_UNUSUAL = re.compile(
    rb"\r\n(?:transfer-encoding|expect|upgrade):|\r\nconnection:(?![ \t]*keep-alive\r\n)|[^\r]\n", re.IGNORECASE
)


@dataclass(frozen=True)
class TurnAway:
    """Which requests are turned away, and how."""

    path: str  # of the POSTs that are; all others are taken on
    admission: Admission
    detail: str  # what a refused client is told
    retry_after_s: int
    count: Callable[[], None]  # notes one 503

    @property
    def answer(self) -> JSONResponse:
        return JSONResponse({"detail": self.detail}, 503, {"retry-after": str(self.retry_after_s)})


class TurnAwayMiddleware:
    """ASGI middleware: 503 while the service is full, before the body is read."""

    def __init__(self, app: App, turn_away: TurnAway) -> None:
        self._app = app
        self._turn_away = turn_away
        self._answer = turn_away.answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turn_away = self._turn_away
        asked = scope["type"] == "http" and scope["path"] == turn_away.path
        if asked and _TAKEN_ON not in scope.get("state", ()) and turn_away.admission.is_full():
            turn_away.count()
            await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def turning_away(turn_away: TurnAway, token: str | None) -> type[H11Protocol]:
    """Return uvicorn's protocol with the short way to a 503. token: what a request has to bring to be told so."""
    head = "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in turn_away.answer.raw_headers)
    answer = f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n".encode() + bytes(turn_away.answer.body)
    begin = f"POST {turn_away.path} HTTP/1.1\r\n".encode()
    arrivals = _Arrivals()

    class TurningAway(H11Protocol):
        _waiting = b""  # what came of a request that was taken on and has not begun

        def data_received(self, data: bytes) -> None:
            if self._waiting:
                self._waiting += data
                self.flow.pause_reading()
            elif not data.startswith(begin) or not self._is_idle():
                super().data_received(data)
            elif not turn_away.admission.is_full(arrivals.number):
                self._unset_keepalive_if_required()
                self._waiting = data
                arrivals.add(self.loop, self._begin)
            elif _is_whole(data, token):
                turn_away.count()
                self.transport.write(answer)
                self.on_response_complete()
            else:
                super().data_received(data)

        def _begin(self) -> None:
            data, self._waiting = self._waiting, b""
            if not self.transport.is_closing():
                self.flow.resume_reading()
                before, self.app_state = self.app_state, {**self.app_state, _TAKEN_ON: True}
                try:
                    super().data_received(data)
                finally:
                    self.app_state = before

        def _is_idle(self) -> bool:
            states = (self.conn.our_state, self.conn.their_state)
            return states == (h11.IDLE, h11.IDLE) and self.conn.trailing_data == (b"", False)

    return TurningAway


class _Arrivals:
    """Requests that were taken on and are not under way; one begins in each turn of the event loop.

    Between two turns the loop reads what has come, so that nobody who is turned away waits for all of them to begin.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_begun = 0  # in the last turn: its task runs in this one, and counts itself

    @property
    def number(self) -> int:
        return len(self._waiting) + self._num_begun

    def add(self, loop: Any, begin: Callable[[], None]) -> None:
        if not self.number:
            loop.call_soon(self._begin_next, loop)
        self._waiting.append(begin)

    def _begin_next(self, loop: Any) -> None:
        self._num_begun = min(1, len(self._waiting))
        if self._waiting:
            loop.call_soon(self._begin_next, loop)
            self._waiting.popleft()()


def _is_whole(data: bytes, token: str | None) -> bool:
    """Return whether `data` is one request with all of its body, with the token if one is asked for."""
    end = data.find(b"\r\n\r\n")
    head = data[: end + 2]
    length = _LENGTH.findall(head)
    if end < 0 or len(length) != 1 or len(data) != end + 4 + int(length[0]) or _UNUSUAL.search(head):
        return False
    given = _TOKEN.search(head)
    return token is None or is_authorised(given[1] if given else None, token)
