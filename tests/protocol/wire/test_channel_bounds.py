"""What bounds a channel: queues, deadlines, attempts to connect, and the threads that it leaves behind."""

import threading
from collections.abc import Iterator

import pytest
import zmq

from protocol.errors import NeighbourError
from protocol.wire.channel import DealerChannel, KeyPair, RouterChannel

ROUTER_KEYS, PEER_KEYS = KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair())


@pytest.fixture
def router() -> Iterator[RouterChannel]:
    channel = RouterChannel("127.0.0.1", ROUTER_KEYS, [PEER_KEYS.public])
    yield channel
    channel.close(linger_s=0)


@pytest.fixture
def peer(router: RouterChannel) -> Iterator[DealerChannel]:
    channel = DealerChannel(router.address, "rank-0", PEER_KEYS, ROUTER_KEYS.public)
    yield channel
    channel.close()


def test_router_queues_for_a_peer_that_does_not_read_whatever_the_number(
    router: RouterChannel, peer: DealerChannel
) -> None:
    peer.send([b"here"], 20.0)
    assert router.receive(20.0) == (b"rank-0", [b"here"])
    # 16 MiB in 4096 messages: more than the kernel's buffers and than a socket's own thousand on either side.
    assert all(router.send(b"rank-0", [b"%d" % i, bytes(4096)]) for i in range(4096))
    assert [(peer.receive(20.0) or [b"none"])[0] for _ in range(4096)] == [b"%d" % i for i in range(4096)]


def test_call_has_one_deadline_for_the_connection_and_the_answer(
    router: RouterChannel, peer: DealerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    waits: list[float] = []

    def send(frames: list[bytes], timeout_s: float) -> None:
        clock[0] += 4.0  # the connection took so long to stand

    monkeypatch.setattr("protocol.wire.channel.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(peer, "send", send)
    monkeypatch.setattr(peer, "receive", waits.append)  # returns None: no answer
    for timeout_s in (5.0, 3.0):
        with pytest.raises(NeighbourError, match="did not answer"):
            peer.call([b"question"], timeout_s)
    assert waits == [1.0, 0.0]


def test_attempt_to_connect_whose_first_packet_was_lost_is_given_up_within_three_seconds(peer: DealerChannel) -> None:
    assert peer._socket.getsockopt(zmq.CONNECT_TIMEOUT) == 3_000


def test_router_lets_thousands_of_peers_wait_that_connect_at_once(router: RouterChannel) -> None:
    assert router._socket.getsockopt(zmq.BACKLOG) >= 4_000


def test_channels_that_are_closed_leave_no_context_and_no_thread() -> None:
    before = set(threading.enumerate())
    router = RouterChannel("127.0.0.1", ROUTER_KEYS, [PEER_KEYS.public])
    peer = DealerChannel(router.address, "rank-0", PEER_KEYS, ROUTER_KEYS.public)
    peer.close()
    router.close(linger_s=0)

    assert (peer._context.closed, router._context.closed) == (True, True)
    assert set(threading.enumerate()) <= before
