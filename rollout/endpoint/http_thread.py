"""The endpoint's own thread and event loop: the engine's loop waits for no agent, and no agent for it."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from protocol.errors import OperatorError
from protocol.http.listen import bind

_log = logging.getLogger(__name__)
_BACKLOG = 4096
_END_S = 10.0
_NUM_PORTS = 256


class HttpThread:
    """Serves one app on one socket until it is closed."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        listener.listen(_BACKLOG)
        # h11 bounds a request's head (64 KiB) before anybody has shown a key; httptools, where installed, does not.
        config = uvicorn.Config(
            app,
            http="h11",
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="agents-http", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the function called in the thread's event loop, in the order of these calls."""
        self._loop.call_soon_threadsafe(function, *arguments)

    async def close(self) -> None:
        """End the thread; called in another event loop."""
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join, _END_S)
        if self._thread.is_alive():
            _log.warning("agents  the thread of the OpenAI-compatible address did not end within %g s", _END_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the first free port from `port` on; 0: any free one.

    Raises: OperatorError when there is none, or the host is not of this machine.
    """
    last = min(port + _NUM_PORTS - 1, 65535) if port else 0
    for number in range(port, last + 1):
        try:
            return bind("agents", host, number)
        except OperatorError as error:
            if number == last or "is taken" not in str(error):
                raise OperatorError(f"settings: agents.host = {host}, agents.port = {port}: {error}") from None
    raise AssertionError("no port was tried")
