"""A TCP link in front of a listening address that can be cut: bytes stop and nothing is closed, as with a pulled cable.

What was sent into a cut link arrives when it is joined again, in order, as TCP has it.
"""

import selectors
import socket
import threading
from typing import Any

_CHUNK_BYTES = 1 << 16


class CuttableLink:
    """Forwards between `address` and the target from a thread of its own. Connections made while cut get no answer."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()[:2]
        self._joined = threading.Event()
        self._joined.set()
        self._is_closing = False
        self._other: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="cuttable-link", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return the link's near end as ZeroMQ writes it."""
        return f"tcp://{self.host}:{self.port}"

    def cut(self) -> None:
        self._joined.clear()

    def join(self) -> None:
        self._joined.set()

    def close(self) -> None:
        self._is_closing = True
        self._joined.set()
        self._thread.join()
        for end in (*self._other, self._listener):
            end.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._is_closing:
            self._joined.wait()
            for key, _ in self._selector.select(0.02):
                if self._joined.is_set():
                    self._advance(key.fileobj)

    def _advance(self, ready: Any) -> None:
        if ready is self._listener:
            near = self._listener.accept()[0]
            try:
                far = socket.create_connection(self._target, timeout=5.0)
            except OSError:  # the target has gone
                near.close()
                return
            self._other |= {near: far, far: near}
            for end in (near, far):
                self._selector.register(end, selectors.EVENT_READ)
            return
        if ready not in self._other:
            return
        try:
            chunk = ready.recv(_CHUNK_BYTES)
            self._other[ready].sendall(chunk)
        except OSError:
            chunk = b""
        if not chunk:
            self._part(ready)

    def _part(self, end: socket.socket) -> None:
        for one in (end, self._other[end]):
            self._selector.unregister(one)
            self._other.pop(one)
            one.close()
