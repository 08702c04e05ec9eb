"""Connections without an allowed key, by thousands, while the one who checks the keys dies.

    python -m tests.chaos.strangers [--seed N] [--short] [--connections N]

Strangers of every kind (`tests.chaos.rig.stranger_kinds`) knock at a `RouterChannel`. In the first half an allowed peer
that is connected, and a new one with every hundred strangers, must get their answers. Then the authenticator's thread
ends in the middle of a hundred, its socket left as it is; for the last quarter that is closed too. From its end on
nobody new gets in, allowed keys included; the peer that was connected is still answered. holds: no frame of a stranger
reached the application, all who should be answered were, descriptors and memory are what they were.
"""

import gc
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import psutil
import zmq

from protocol.errors import NeighbourError
from protocol.wire.channel import DealerChannel, KeyPair, RouterChannel
from tests.chaos.rig.stranger_kinds import KINDS, Closer, Door, knock, new_keys
from tests.chaos.rig.verdict import conclude, options

MAX_GROWTH_MB = 20.0
_BATCH = 100
_ALLOWED, _LATE = "peer", "late"


class Application:
    """What stands behind the socket: answers everything with its own words and counts whom it heard."""

    def __init__(self, channel: RouterChannel) -> None:
        self.heard: Counter[str] = Counter()
        self._channel = channel
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._answer_all)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()

    def _answer_all(self) -> None:
        while not self._is_closing.is_set():
            if (received := self._channel.receive(0.05)) is not None:
                peer, frames = received
                self.heard[peer.decode("utf-8", errors="replace").split("-")[0]] += 1
                self._channel.send(peer, frames)


class House:
    """A socket with its application and one peer inside. What it counts is what the figure says."""

    def __init__(self, random: Random) -> None:
        self.keys, self.peer_keys = new_keys(), new_keys()
        self.channel = RouterChannel("127.0.0.1", self.keys, [self.peer_keys.public])
        self.door = Door(self.channel.address, self.keys.public, self.peer_keys.public)
        self.knocked: Counter[str] = Counter()
        self.num_answered = self.num_unanswered = self.num_late_answered = 0
        self._monitor = self.channel._socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._num_expected = self._num_accepted = 0
        self._random = random
        self.application = Application(self.channel)
        self._inside = self._dealer(_ALLOWED, self.peer_keys)
        self._num_peers = 0

    def admit_strangers(self, number: int) -> list[Closer]:
        """Have strangers of random kinds knock, and return when each of them was let as far as the handshake."""
        context: zmq.Context[Any] = zmq.Context()
        closers: list[Closer] = []
        for _ in range(number):
            kind = self._random.choice(KINDS)
            self.knocked[kind] += 1
            closers.append(knock(kind, self.door, context, self._random))
        closers.append(context.term)
        self.expect(number)
        return closers

    def expect(self, number: int) -> None:
        self._num_expected += number
        deadline = time.monotonic() + 20.0
        while self._num_accepted < self._num_expected and time.monotonic() < deadline:
            if self._monitor.poll(20):
                self._monitor.recv_multipart()
                self._num_accepted += 1

    def ask_from_inside(self) -> None:
        """Have the peer that is connected already say a word: it is answered at all times."""
        self._note(self._call(self._inside, 10.0))

    def ask_as_newcomer(self) -> None:
        """Have a new peer with an allowed key connect: it is answered."""
        self._num_peers += 1
        self._note(self._call_anew(f"{_ALLOWED}-{self._num_peers}", self.peer_keys, 10.0))

    def ask_too_late(self) -> None:
        """Have new peers connect when nobody checks keys: one with an allowed key, one with another. None is heard."""
        self._num_peers += 1
        for keys in (self.peer_keys, new_keys()):
            self.num_late_answered += self._call_anew(f"{_LATE}-{self._num_peers}", keys, 0.3)

    def end_checking(self) -> None:
        """End the authenticator's thread and nothing else, as an error inside it would."""
        self.channel._authenticator.pipe.send(b"TERMINATE")
        self.channel._authenticator.thread.join()

    def close(self) -> None:
        self._inside.close()
        self.application.close()
        self.channel._socket.disable_monitor()
        self._monitor.close()
        self.channel.close(linger_s=0)

    def _note(self, is_answered: bool) -> None:
        self.num_answered += is_answered
        self.num_unanswered += not is_answered

    def _call_anew(self, name: str, keys: KeyPair, timeout_s: float) -> bool:
        dealer = self._dealer(name, keys)
        is_answered = self._call(dealer, timeout_s)
        dealer.close()
        self._drain_monitor()
        return is_answered

    def _call(self, dealer: DealerChannel, timeout_s: float) -> bool:
        with suppress(NeighbourError):
            return dealer.call([b"anybody there?"], timeout_s) == [b"anybody there?"]
        return False

    def _dealer(self, name: str, keys: KeyPair) -> DealerChannel:
        return DealerChannel(self.door.address, name, keys, self.keys.public)

    def _drain_monitor(self) -> None:
        """Forget connections of allowed peers: how many there are is libzmq's matter."""
        while self._monitor.poll(5):
            self._monitor.recv_multipart()


def main() -> int:
    chosen = options(__doc__, connections=0)
    num_connections = chosen.connections or (600 if chosen.short else 10_000)
    random = Random(chosen.seed)
    besiege(Random(0), 2 * _BATCH)  # so that imports and caches are no growth
    before = _resources()
    house = besiege(random, num_connections)
    gc.collect()
    num_files, rss_mb = (now - then for now, then in zip(_resources(), before, strict=True))
    heard = house.application.heard
    num_heard = sum(number for name, number in heard.items() if name != _ALLOWED)
    print(f"knocked: {dict(sorted(house.knocked.items()))}")
    print(f"the application heard {dict(heard)}")
    holds = (
        not (num_heard or house.num_unanswered or house.num_late_answered) and num_files <= 0 and rss_mb < MAX_GROWTH_MB
    )
    return conclude(
        "strangers",
        holds,
        connections=sum(house.knocked.values()),
        frames_heard=num_heard,
        answered=house.num_answered,
        unanswered=house.num_unanswered,
        late_answered=house.num_late_answered,
        files_left=int(num_files),
        growth_mb=rss_mb,
    )


def besiege(random: Random, num_connections: int) -> House:
    """Return the counts of a house that num_connections strangers came to, closed again."""
    house = House(random)
    house.ask_from_inside()
    num_batches = num_connections // _BATCH
    standing: list[Closer] = []  # those of the batch before: they had time to say what they came for
    for batch in range(num_batches):
        quarter = 4 * batch // num_batches
        closers = house.admit_strangers(_BATCH // 2)
        if quarter == 2 and house.channel._authenticator.is_alive():
            house.end_checking()
        if quarter == 3 and 4 * (batch - 1) // num_batches == 2:
            house.channel._authenticator.zap_socket.close()
        closers += house.admit_strangers(_BATCH - _BATCH // 2)
        house.ask_from_inside()
        if quarter < 2:
            house.ask_as_newcomer()
        else:
            house.ask_too_late()
        _close(standing)
        standing = closers
    _close(standing)
    house.close()
    return house


def _close(closers: list[Closer]) -> None:
    for close in closers:
        close()


def _resources() -> tuple[float, float]:
    """Return the open descriptors and the memory (MB) of this process, once libzmq has closed what it was told to."""
    process = psutil.Process()
    deadline = time.monotonic() + 2.0
    least = process.num_fds()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        least = min(least, process.num_fds())
    return least, process.memory_info().rss / 1e6


if __name__ == "__main__":
    sys.exit(main())
