"""What a connection's own heartbeats find out when its link is cut and nothing is closed."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from protocol.errors import NeighbourError
from protocol.wire.channel import DealerChannel, KeyPair, Pulse, RouterChannel
from tests.fakes.cuttable_link import CuttableLink
from tests.fakes.waiting import wait_until

ROUTER_KEYS, PEER_KEYS = KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair())
QUICK = Pulse(every_ms=50, silence_ms=200)


@pytest.fixture
def router() -> Iterator[RouterChannel]:
    channel = RouterChannel("127.0.0.1", ROUTER_KEYS, [PEER_KEYS.public], pulse=QUICK)
    yield channel
    channel.close(linger_s=0)


@pytest.fixture
def link(router: RouterChannel) -> Iterator[CuttableLink]:
    link = CuttableLink("127.0.0.1", int(router.address.rpartition(":")[2]))
    yield link
    link.close()


@pytest.fixture
def peer(link: CuttableLink) -> Iterator[DealerChannel]:
    channel = DealerChannel(link.address, "rank-0", PEER_KEYS, ROUTER_KEYS.public, QUICK)
    yield channel
    channel.close()


def greet(router: RouterChannel, peer: DealerChannel) -> None:
    peer.send([b"here"], 20.0)
    assert router.receive(20.0) == (b"rank-0", [b"here"])


def test_router_gives_up_a_peer_behind_a_cut_link_after_its_silence(
    router: RouterChannel, link: CuttableLink, peer: DealerChannel
) -> None:
    greet(router, peer)
    link.cut()
    wait_until(lambda: not router.send(b"rank-0", [b"still there?"]))


def test_dealer_finds_no_connection_behind_a_cut_link(
    router: RouterChannel, link: CuttableLink, peer: DealerChannel
) -> None:
    greet(router, peer)
    link.cut()

    def is_cut_off() -> bool:
        try:
            peer.send([b"anyone?"], 0.0)
        except NeighbourError:
            return True
        return False

    wait_until(is_cut_off)


def test_dealer_connects_again_by_itself_when_the_link_is_back(
    router: RouterChannel, link: CuttableLink, peer: DealerChannel
) -> None:
    greet(router, peer)
    link.cut()
    wait_until(lambda: not router.send(b"rank-0", [b"still there?"]))
    link.join()

    def is_heard() -> bool:
        # What went into the old connection, before the dealer knew of its end, is lost with it.
        peer.try_send([b"back"], 0.0)
        return router.receive(0.1) == (b"rank-0", [b"back"])

    wait_until(is_heard)
    assert router.send(b"rank-0", [b"welcome"])


def test_a_quiet_connection_stays_while_its_process_is_busy() -> None:
    # No link between them, which is Python too; and a silence that no busy machine makes by itself.
    pulse = Pulse(every_ms=100, silence_ms=700)
    router = RouterChannel("127.0.0.1", ROUTER_KEYS, [PEER_KEYS.public], pulse=pulse)
    peer = DealerChannel(router.address, "rank-0", PEER_KEYS, ROUTER_KEYS.public, pulse)
    greet(router, peer)
    until = time.monotonic() + 1.5  # twice the silence that ends a connection, in pure Python at full CPU
    while time.monotonic() < until:
        sum(range(1000))
    assert router.send(b"rank-0", [b"still there?"])
    assert peer.receive(20.0) == [b"still there?"]
    peer.close()
    router.close(linger_s=0)


class Breaking:
    """A socket whose connection has gone each time that a poll found it ready, `number` times."""

    def __init__(self, socket: Any, number: int) -> None:
        self._socket = socket
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def poll(self, timeout: int, flags: int = zmq.POLLIN) -> int:
        return flags if self._number else self._socket.poll(timeout, flags)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        if self._number:
            self._number -= 1
            raise zmq.Again
        self._socket.send_multipart(frames, flags)


def test_send_waits_on_when_the_connection_has_gone_after_the_poll(router: RouterChannel, peer: DealerChannel) -> None:
    """It once ended the rank: a send into it raised what nobody expects."""
    greet(router, peer)
    peer._socket = Breaking(peer._socket, 2)
    peer.send([b"question"], 20.0)
    assert router.receive(20.0) == (b"rank-0", [b"question"])


def test_send_fails_when_the_connection_has_gone_for_good_after_the_poll() -> None:
    nobody = RouterChannel("127.0.0.1", ROUTER_KEYS, [])
    nobody.close(linger_s=0)
    peer = DealerChannel(nobody.address, "rank-0", PEER_KEYS, ROUTER_KEYS.public)
    peer._socket = Breaking(peer._socket, 1)
    assert peer.try_send([b"anyone?"], 0.0) is False
    peer.close()


def test_a_cut_link_is_noticed_within_six_seconds_by_default() -> None:
    assert Pulse().every_ms + Pulse().silence_ms <= 6_000


def test_threads_of_a_link_end_with_it(router: RouterChannel) -> None:
    link = CuttableLink("127.0.0.1", int(router.address.rpartition(":")[2]))
    link.cut()
    link.close()
    assert not any(thread.name == "cuttable-link" for thread in threading.enumerate())
