"""ZeroMQ sockets with CURVE: one ROUTER at the coordinator, a DEALER at every rollout server and learner rank.

A channel belongs to the thread that made it.
"""

import contextlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from protocol.addresses import bind_own_port, with_port
from protocol.errors import NeighbourError, OperatorError
from protocol.waits import until

_AnySocket = zmq.Socket[Any]
_DOMAIN = "sluice"
_MAX_FRAME_BYTES = 1 << 28
_NOT_BLOCKING, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_COPIED_BYTES = 1 << 16  # larger frames are sent without a copy
# Further frames are dropped: no message to a coordinator has so many.
_MAX_FRAMES_KEPT = 16
# Longest time that a silent connection holds a descriptor.
_HANDSHAKE_MS = 10_000
# The kernel repeats a lost first packet after 1, 3, 7, 15 s: without new attempts a restored link stays unused for half
# a minute.
_CONNECT_MS = 3_000
# All servers reconnect at once after a coordinator's restart.
_BACKLOG = 4096


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair."""

    public: bytes  # 40 characters of Z85
    secret: bytes  # 40 characters of Z85; in no log and no argument list

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.decode()})"


@dataclass(frozen=True)
class Pulse:
    """The heartbeats of a connection; a silent one is closed after every_ms + silence_ms at most.

    TCP alone does not report a cut link for minutes. libzmq's threads send heartbeats: a busy process keeps its
    connections, a stopped one loses them.
    """

    every_ms: int = 1_000  # time between two heartbeats on a quiet connection
    silence_ms: int = 5_000  # longest time from a heartbeat to the peer's next sign of life


class RouterChannel:
    """The coordinator's side: many named peers, encrypted, with keys of the allowlist only.

    ZAP_ENFORCE_DOMAIN refuses every connection when no authenticator answers; by default libzmq accepts any key then.
    """

    def __init__(
        self,
        host: str,
        keys: KeyPair,
        allowed: Iterable[bytes],
        max_frame_bytes: int = _MAX_FRAME_BYTES,
        handshake_ms: int = _HANDSHAKE_MS,
        pulse: Pulse = Pulse(),
    ) -> None:
        """A peer that sends a longer frame, or does not prove its key within handshake_ms, is disconnected.

        Raises: OperatorError when `host` is not an address of this node.
        """
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, _Allowlist(allowed))
        self._socket = self._context.socket(zmq.ROUTER)
        _secure(self._socket, keys, pulse)
        self._socket.curve_server = True
        self._socket.zap_domain = _DOMAIN.encode()
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        # Without MANDATORY a frame for an absent peer is dropped silently. Without HANDOVER a peer that reconnects
        # before its old connection is closed is ignored.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, handshake_ms)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        try:
            port = _bind(self._socket, host)
        except OperatorError:
            self.close(linger_s=0)
            raise
        except zmq.ZMQError as error:
            self.close(linger_s=0)
            raise OperatorError(
                f"The coordinator cannot listen on {host}: {error}. Use an address of this node."
            ) from None
        self.address = f"tcp://{with_port(host, port)}"

    def receive(self, timeout_s: float) -> tuple[bytes, list[bytes]] | None:
        """Return the next (peer, frames), or None after timeout_s. Keeps the first 16 frames of a message."""
        if timeout_s and not self._socket.poll(int(timeout_s * 1000)):
            return None
        # recv_multipart asks the socket for each next frame, which doubles the time.
        try:
            part = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        peer, frames = part.bytes, list[bytes]()
        while part.more:
            part = self._socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) < _MAX_FRAMES_KEPT:
                frames.append(part.bytes)
        return peer, frames

    def send(self, peer: bytes, frames: list[bytes]) -> bool:
        """Queue frames for a peer; False when it is not connected or its queue is full. Never blocks."""
        send = self._socket.send
        try:
            # send_multipart combines flags for each frame, which doubles the time.
            send(peer, _MORE)
            for frame in frames[:-1]:
                send(frame, _MORE, len(frame) < _COPIED_BYTES)
            send(frames[-1], _NOT_BLOCKING)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self, linger_s: float = 1.0) -> None:
        self._socket.close(linger=int(linger_s * 1000))
        if not self._authenticator.is_alive() and self._authenticator.pipe:
            # Its thread has crashed: `stop` would block for ever.
            self._authenticator.pipe.close()
            self._authenticator.pipe = None  # type: ignore[assignment]
        self._authenticator.stop()
        self._context.term()


class DealerChannel:
    """A learner rank's side. Every wait has a deadline."""

    def __init__(self, address: str, name: str, keys: KeyPair, coordinator_key: bytes, pulse: Pulse = Pulse()) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # Only a connection with accepted keys takes a frame: this separates "could not be reached" from "no answer".
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        _connect(self._socket, address, name, keys, coordinator_key, pulse)
        self._address = address
        self.name = name

    def send(self, frames: list[bytes], timeout_s: float) -> None:
        """Send frames. Raises: NeighbourError("coordinator") naming the address when there is no connection in time."""
        if not self.try_send(frames, timeout_s):
            raise NeighbourError("coordinator", f"{self._address} could not be reached within {timeout_s:g} s")

    def try_send(self, frames: list[bytes], timeout_s: float) -> bool:
        """Send frames; False when there is no connection in time."""
        for left_s in until(timeout_s):
            if not self._socket.poll(math.ceil(left_s * 1000), zmq.POLLOUT):
                return False
            with contextlib.suppress(zmq.Again):  # the connection broke after the poll
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                return True
        return False

    def call(self, frames: list[bytes], timeout_s: float) -> list[bytes]:
        """Send frames and return the next ones. Raises: NeighbourError("coordinator") when none come in time."""
        deadline = time.monotonic() + timeout_s
        self.send(frames, timeout_s)
        answer = self.receive(max(0.0, deadline - time.monotonic()))
        if answer is None:
            raise NeighbourError("coordinator", f"{self._address} did not answer within {timeout_s:g} s")
        return answer

    def receive(self, timeout_s: float) -> list[bytes] | None:
        """Return the next frames, or None after timeout_s."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:  # the connection broke after the poll
            return None

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


class AsyncDealerChannel:
    """A rollout server's side, inside its event loop. It reconnects automatically; the outbox repeats lost messages.

    Nothing is queued without a connection: after a killed run the queue would grow until the machine is out of memory.
    """

    def __init__(self, address: str, name: str, keys: KeyPair, coordinator_key: bytes) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        # True if the last frames were sent. A query of the socket would consume the event of an arrived frame.
        self.is_connected = False
        _connect(self._socket, address, name, keys, coordinator_key, Pulse())

    async def send(self, frames: list[bytes]) -> bool:
        """Send frames; False when there is no connection."""
        try:
            await self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.is_connected = False
        else:
            self.is_connected = True
        return self.is_connected

    async def receive(self, timeout_s: float) -> list[bytes] | None:
        """Return the next frames, or None after timeout_s.

        Polls first: cancelling a waiting recv_multipart can lose a message.
        """
        for left_s in until(timeout_s):
            if await self._socket.poll(int(left_s * 1000) + 1):
                with contextlib.suppress(zmq.Again):  # the connection broke after the poll
                    frames: list[bytes] = await self._socket.recv_multipart(zmq.NOBLOCK)
                    return frames
        return None

    def close(self) -> None:
        self._socket.close(linger=200)
        self._context.term()


class _Allowlist:
    """The authenticator's callback: accepts the keys of a list."""

    def __init__(self, allowed: Iterable[bytes]) -> None:
        self._allowed = frozenset(allowed)

    def callback(self, domain: str, key: bytes) -> bool:
        return domain == _DOMAIN and key in self._allowed


def _bind(socket: _AnySocket, host: str) -> int:
    """Return the one of our ports that the socket was bound to. Raises: as `bind_own_port`."""
    socket.ipv6 = ":" in host
    bind_own_port(host, lambda port: socket.bind(f"tcp://{with_port(host, port or '*')}"))
    return int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _secure(socket: _AnySocket, keys: KeyPair, pulse: Pulse) -> None:
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    # Credit is explicit (leases): no queue drops a message.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, pulse.every_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, pulse.silence_ms)


def _connect(socket: _AnySocket, address: str, name: str, keys: KeyPair, coordinator_key: bytes, pulse: Pulse) -> None:
    _secure(socket, keys, pulse)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.curve_serverkey = coordinator_key
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
    socket.ipv6 = "[" in address
    socket.connect(address)
