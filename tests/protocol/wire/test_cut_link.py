"""What a connection's own heartbeats find out when its link is cut and nothing is closed."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from protocol.errors import NeighbourError
from protocol.wire.channel import DealerChannel, KeyPair, Pulse, RouterChannel
from tests.fakes.cuttable_link import CuttableLink

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


def seconds_until(is_so: Callable[[], bool], limit_s: float = 10.0) -> float:
    """Return how long it took until this was so. Raises: AssertionError after limit_s."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < limit_s, f"not so within {limit_s:g} s"
        time.sleep(0.01)
    return time.monotonic() - begun


def greet(router: RouterChannel, peer: DealerChannel) -> None:
    peer.send([b"here"], 5.0)
    assert router.receive(5.0) == (b"rank-0", [b"here"])


def test_router_gives_up_a_peer_behind_a_cut_link_after_its_silence(
    router: RouterChannel, link: CuttableLink, peer: DealerChannel
) -> None:
    greet(router, peer)
    link.cut()
    assert seconds_until(lambda: not router.send(b"rank-0", [b"still there?"])) > 0.1


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

    assert seconds_until(is_cut_off) > 0.1


def test_dealer_connects_again_by_itself_when_the_link_is_back(
    router: RouterChannel, link: CuttableLink, peer: DealerChannel
) -> None:
    greet(router, peer)
    link.cut()
    seconds_until(lambda: not router.send(b"rank-0", [b"still there?"]))
    link.join()

    def is_heard() -> bool:
        # What went into the old connection, before the dealer knew of its end, is lost with it.
        peer.try_send([b"back"], 0.0)
        return router.receive(0.1) == (b"rank-0", [b"back"])

    seconds_until(is_heard)
    assert router.send(b"rank-0", [b"welcome"])


def test_a_quiet_connection_stays_while_its_process_is_busy(
    router: RouterChannel, link: CuttableLink, peer: DealerChannel
) -> None:
    greet(router, peer)
    until = time.monotonic() + 1.0  # five times the silence that ends a connection, in pure Python at full CPU
    while time.monotonic() < until:
        sum(range(1000))
    assert router.send(b"rank-0", [b"still there?"])
    assert peer.receive(5.0) == [b"still there?"]


def test_a_cut_link_is_noticed_within_six_seconds_by_default() -> None:
    assert Pulse().every_ms + Pulse().silence_ms <= 6_000


def test_threads_of_a_link_end_with_it(router: RouterChannel) -> None:
    link = CuttableLink("127.0.0.1", int(router.address.rpartition(":")[2]))
    link.cut()
    link.close()
    assert not any(thread.name == "cuttable-link" for thread in threading.enumerate())
