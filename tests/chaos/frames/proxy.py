"""A proxy between peers and coordinator that mistreats whole messages: it ends CURVE on both sides and holds both keys.

Forked by a rig; `route` is what the rig calls with the coordinator's address. What a real network cannot do inside
CURVE (flip a byte, cut a frame, send a message twice or in another order) happens here, after decryption.
"""

import heapq
import multiprocessing
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import zmq

from protocol.node.home import Keys
from protocol.wire.channel import RouterChannel


@dataclass(frozen=True)
class Faults:
    """Shares of messages, each drawn by itself. A message out of order is held for up to hold_s."""

    seed: int
    dropped: float = 0.0
    duplicated: float = 0.0
    reordered: float = 0.0
    corrupted: float = 0.0
    hold_s: float = 0.2


class FrameProxy:
    """Call `route` from the rig's process; `close` ends the proxy and returns what it did, by kind of fault."""

    def __init__(self, keys: Keys, faults: Faults) -> None:
        self._keys = keys
        self._faults = faults
        self._process: Any = None
        self._pipe: Connection | None = None
        self._address = ""

    def route(self, address: str) -> str:
        """Return the proxy's own address for a coordinator's."""
        if self._pipe is None:
            context = multiprocessing.get_context("fork")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_run, args=(theirs, address, self._keys, self._faults), daemon=True)
            self._process.start()
            theirs.close()
            self._address = self._pipe.recv()
        return self._address

    def close(self) -> dict[str, int]:
        if self._pipe is None:
            return {}
        self._pipe.send("close")
        counts: dict[str, int] = self._pipe.recv()
        self._process.join(10.0)
        return counts


def _run(pipe: Connection, upstream: str, keys: Keys, faults: Faults) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    front = RouterChannel("127.0.0.1", keys.coordinator, allowed=[keys.peer.public])
    proxy = _Proxy(front, upstream, keys, faults)
    pipe.send(front.address)
    while not pipe.poll():
        proxy.turn()
    pipe.send(dict(proxy.counts))
    proxy.close()


class _Proxy:
    """One DEALER to the coordinator for each peer, under the peer's name."""

    def __init__(self, front: RouterChannel, upstream: str, keys: Keys, faults: Faults) -> None:
        self.counts: Counter[str] = Counter()
        self._front = front
        self._upstream = upstream
        self._keys = keys
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._context = zmq.Context()
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        # (when, number, peer, is to the coordinator, frames); the number keeps equal times in order.
        self._held: list[tuple[float, int, bytes, bool, list[bytes]]] = []
        self._num_held = 0

    def turn(self) -> None:
        """Pass on what has come and what was held long enough."""
        received = self._front.receive(0.002)
        while received is not None:
            self._pass(received[0], True, received[1])
            received = self._front.receive(0.0)
        for peer, back in list(self._backs.items()):
            while back.poll(0):
                self._pass(peer, False, back.recv_multipart())
        while self._held and self._held[0][0] <= time.monotonic():
            _, _, peer, is_up, frames = heapq.heappop(self._held)
            self._send(peer, is_up, frames)

    def close(self) -> None:
        self._front.close(linger_s=0.0)
        self._context.destroy(linger=0)

    def _pass(self, peer: bytes, is_up: bool, frames: list[bytes]) -> None:
        self.counts["messages"] += 1
        faults, draw = self._faults, self._random.random
        if draw() < faults.dropped:
            self.counts["dropped"] += 1
            return
        if draw() < faults.corrupted:
            self.counts["corrupted"] += 1
            frames = self._corrupted(frames)
        copies = 1
        if draw() < faults.duplicated:
            self.counts["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            if draw() < faults.reordered:
                self.counts["reordered"] += 1
                self._num_held += 1
                due = time.monotonic() + self._random.uniform(0.0, faults.hold_s)
                heapq.heappush(self._held, (due, self._num_held, peer, is_up, frames))
            else:
                self._send(peer, is_up, frames)

    def _corrupted(self, frames: list[bytes]) -> list[bytes]:
        """Return the frames with a bit flipped, one cut short, or one missing."""
        place = self._random.randrange(len(frames))
        frame = bytearray(frames[place])
        kind = self._random.choice(("flip", "cut", "lose"))
        if kind == "flip" and frame:
            frame[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
        elif kind == "cut" and frame:
            del frame[self._random.randrange(len(frame)) :]
        else:
            return frames[:place] + frames[place + 1 :] or [b""]
        return [*frames[:place], bytes(frame), *frames[place + 1 :]]

    def _send(self, peer: bytes, is_up: bool, frames: list[bytes]) -> None:
        if not is_up:
            self._front.send(peer, frames)
            return
        if peer not in self._backs:
            self._backs[peer] = self._connect(peer)
        self._backs[peer].send_multipart(frames)

    def _connect(self, peer: bytes) -> "zmq.Socket[bytes]":
        back: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        back.curve_publickey, back.curve_secretkey = self._keys.peer.public, self._keys.peer.secret
        back.curve_serverkey = self._keys.coordinator.public
        back.identity = peer
        back.sndhwm = back.rcvhwm = 0
        back.connect(self._upstream)
        return back
