"""Real sockets on loopback: who gets in, and what happens to what cannot be delivered."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
import zmq

from protocol.addresses import PORTS_VARIABLE
from protocol.errors import NeighbourError, OperatorError
from protocol.wire.channel import AsyncDealerChannel, DealerChannel, KeyPair, RouterChannel
from tests.fakes.cuttable_link import CuttableLink
from tests.fakes.ipv6 import needs_ipv6
from tests.fakes.ports import free_port

MAX_FRAME_BYTES = 1 << 16


def new_keys() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


ROUTER_KEYS, PEER_KEYS = new_keys(), new_keys()


@pytest.fixture
def router() -> Iterator[RouterChannel]:
    channel = RouterChannel("127.0.0.1", ROUTER_KEYS, [PEER_KEYS.public], MAX_FRAME_BYTES)
    yield channel
    channel.close(linger_s=0)


_opened: list[DealerChannel] = []


@pytest.fixture(autouse=True)
def _close_dealers() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def dealer(router: RouterChannel, name: str = "rank-0", keys: KeyPair = PEER_KEYS) -> DealerChannel:
    channel = DealerChannel(router.address, name, keys, ROUTER_KEYS.public)
    _opened.append(channel)
    return channel


@pytest.fixture
def peer(router: RouterChannel) -> DealerChannel:
    return dealer(router)


def join(router: RouterChannel, channel: DealerChannel) -> None:
    """Have a peer say one word and get it back, so that both sides know each other."""

    def echo() -> None:
        received = router.receive(20.0)
        if received is not None:
            router.send(*received)

    thread = threading.Thread(target=echo)
    thread.start()
    try:
        assert channel.call([b"here"], 20.0) == [b"here"]
    finally:
        thread.join()


@pytest.fixture
def channel(router: RouterChannel, peer: DealerChannel) -> DealerChannel:
    """Return a peer that the router knows."""
    join(router, peer)
    return peer


def test_router_receives_from_a_peer_with_an_allowed_key(router: RouterChannel, channel: DealerChannel) -> None:
    assert router.send(b"rank-0", [b"head", b"tail"])
    assert router.receive(0.0) is None


@needs_ipv6
def test_router_and_peer_meet_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTS_VARIABLE, f"{free_port()}-65535")
    for _ in range(2):  # on a port of ours, and on any
        over_ipv6 = RouterChannel("::1", ROUTER_KEYS, [PEER_KEYS.public], MAX_FRAME_BYTES)
        assert over_ipv6.address.startswith("tcp://[::1]:")
        join(over_ipv6, dealer(over_ipv6))
        over_ipv6.close(linger_s=0)
        monkeypatch.delenv(PORTS_VARIABLE, raising=False)


def test_call_returns_all_frames_of_the_answer(router: RouterChannel, channel: DealerChannel) -> None:
    router.send(b"rank-0", [b"1", b"", b"3"])
    assert channel.call([b"question"], 20.0) == [b"1", b"", b"3"]


def test_router_refuses_a_key_outside_its_allowlist(router: RouterChannel) -> None:
    channel = dealer(router, keys=new_keys())
    with pytest.raises(NeighbourError) as caught:
        channel.call([b"let me in"], 0.5)
    assert str(caught.value) == f"coordinator: {router.address} could not be reached within 0.5 s"
    assert router.receive(0.1) is None


def test_dealer_refuses_a_router_with_another_key(router: RouterChannel) -> None:
    channel = DealerChannel(router.address, "rank-0", PEER_KEYS, new_keys().public)
    _opened.append(channel)
    with pytest.raises(NeighbourError, match=r"could not be reached within 0\.3 s$"):
        channel.call([b"who are you"], 0.3)


def test_router_refuses_a_peer_without_keys(router: RouterChannel) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(router.address)
        plain.send(b"let me in")
        assert router.receive(0.5) is None


def test_router_refuses_new_peers_after_its_authenticator_stopped(router: RouterChannel) -> None:
    # libzmq's own default is the opposite: it then lets any key in.
    router._authenticator.stop()
    for keys in (PEER_KEYS, new_keys()):
        channel = dealer(router, name="late", keys=keys)
        with pytest.raises(NeighbourError, match=r"could not be reached within 0\.5 s$"):
            channel.call([b"let me in"], 0.5)
        assert router.receive(0.0) is None


def test_router_closes_after_its_authenticator_s_thread_ended_by_itself() -> None:
    channel = RouterChannel("127.0.0.1", ROUTER_KEYS, [PEER_KEYS.public])
    channel._authenticator.pipe.send(b"TERMINATE")
    channel._authenticator.thread.join()
    channel.close(linger_s=0)
    assert not channel._authenticator.is_alive()


def test_router_closes_a_connection_that_says_nothing() -> None:
    channel = RouterChannel("127.0.0.1", ROUTER_KEYS, [PEER_KEYS.public], handshake_ms=100)
    with socket.create_connection(("127.0.0.1", int(channel.address.rsplit(":", 1)[1])), timeout=5.0) as silent:
        greeting = silent.recv(100)
        assert greeting.startswith(b"\xff")
        assert silent.recv(100) == b""
    channel.close(linger_s=0)


def test_call_names_the_address_when_no_answer_comes(router: RouterChannel, channel: DealerChannel) -> None:
    with pytest.raises(NeighbourError) as caught:
        channel.call([b"hello?"], 0.2)
    assert str(caught.value) == f"coordinator: {router.address} did not answer within 0.2 s"


def test_send_returns_false_for_a_peer_that_never_came(router: RouterChannel) -> None:
    assert router.send(b"nobody", [b"hello"]) is False


def test_send_returns_false_for_a_peer_that_left(router: RouterChannel, channel: DealerChannel) -> None:
    channel.close()
    # The goodbye is on its way: receiving lets the router take note of it.
    for _ in range(100):
        router.receive(0.02)
        if not router.send(b"rank-0", [b"still there?"]):
            break
    assert router.send(b"rank-0", [b"still there?"]) is False


def test_a_peer_that_comes_back_takes_its_name_over(router: RouterChannel) -> None:
    first = dealer(router)
    # A dead peer does not connect again. This one would, and the two would take the name from each other for ever.
    first._socket.reconnect_ivl = -1
    join(router, first)
    second = dealer(router)
    join(router, second)
    assert router.send(b"rank-0", [b"for the second"])
    assert second.call([b"anything for me?"], 20.0) == [b"for the second"]


def test_router_cuts_off_a_peer_whose_frame_is_too_long(router: RouterChannel, channel: DealerChannel) -> None:
    with pytest.raises(NeighbourError, match=r"did not answer within 0\.3 s$"):
        channel.call([b"x" * (MAX_FRAME_BYTES + 1)], 0.3)
    assert router.receive(0.0) is None


def test_router_takes_a_frame_of_the_longest_length(router: RouterChannel, channel: DealerChannel) -> None:
    with pytest.raises(NeighbourError, match="did not answer"):
        channel.call([b"x" * (MAX_FRAME_BYTES - 64)], 0.2)
    received = router.receive(20.0)
    assert received is not None
    assert [len(frame) for frame in received[1]] == [MAX_FRAME_BYTES - 64]


def test_receive_keeps_16_frames_of_a_message_of_more(router: RouterChannel) -> None:
    channel = dealer(router)
    channel.send([b"%d" % i for i in range(1000)], 20.0)
    channel.send([b"next"], 20.0)
    assert router.receive(20.0) == (b"rank-0", [b"%d" % i for i in range(16)])
    assert router.receive(20.0) == (b"rank-0", [b"next"])


def test_receive_returns_none_after_its_time(router: RouterChannel) -> None:
    assert router.receive(0.01) is None


def test_router_says_when_it_cannot_listen() -> None:
    with pytest.raises(OperatorError) as caught:
        RouterChannel("203.0.113.7", ROUTER_KEYS, [])
    assert str(caught.value) == (
        "The coordinator cannot listen on 203.0.113.7: Cannot assign requested address (addr='tcp://203.0.113.7:*'). "
        "Use an address of this node."
    )


async def _until_sent(channel: AsyncDealerChannel, frames: list[bytes]) -> None:
    async with asyncio.timeout(20.0):
        while not await channel.send(frames):
            await asyncio.sleep(0.005)


async def test_async_dealer_keeps_nothing_for_a_connection_that_does_not_stand() -> None:
    router = RouterChannel("127.0.0.1", ROUTER_KEYS, [PEER_KEYS.public], MAX_FRAME_BYTES)
    link = CuttableLink("127.0.0.1", int(router.address.rpartition(":")[2]))
    link.cut()
    channel = AsyncDealerChannel(link.address, "server-0", PEER_KEYS, ROUTER_KEYS.public)
    assert not await channel.send([b"too early"])
    link.join()
    await _until_sent(channel, [b"first"])
    assert channel.is_connected
    assert router.receive(20.0) == (b"server-0", [b"first"])

    router.close(linger_s=0)
    async with asyncio.timeout(20.0):
        while await channel.send([b"the one who hears has gone"]):
            await asyncio.sleep(0.005)
    assert not channel.is_connected
    before = psutil.Process().memory_info().rss
    for _ in range(200):
        assert not await channel.send([bytes(1 << 20)])
    assert psutil.Process().memory_info().rss - before < 50 << 20
    channel.close()
    link.close()


async def test_async_dealer_sends_and_receives(router: RouterChannel) -> None:
    channel = AsyncDealerChannel(router.address, "server-0", PEER_KEYS, ROUTER_KEYS.public)
    await _until_sent(channel, [b"hello", b"there"])
    assert router.receive(20.0) == (b"server-0", [b"hello", b"there"])
    router.send(b"server-0", [b"lease"])
    assert await channel.receive(20.0) == [b"lease"]
    assert await channel.receive(0.05) is None
    channel.close()


async def test_async_receive_waits_on_when_what_had_arrived_is_gone_again(router: RouterChannel) -> None:
    """As when a connection breaks after the poll: here a second receiver takes the frame first."""
    channel = AsyncDealerChannel(router.address, "server-0", PEER_KEYS, ROUTER_KEYS.public)
    await _until_sent(channel, [b"hello"])
    received = router.receive(20.0)
    assert received is not None
    both = {asyncio.create_task(channel.receive(60.0)) for _ in range(2)}
    await asyncio.sleep(0.1)  # both look for a frame
    assert router.send(received[0], [b"lease"])
    (first,), (other,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    assert router.send(received[0], [b"another lease"])
    assert (await first, await other) == ([b"lease"], [b"another lease"])
    channel.close()


def test_secret_key_is_not_in_the_key_pair_s_text() -> None:
    assert PEER_KEYS.secret.decode() not in repr(PEER_KEYS)


# -- bounds -----------------------------------------------------------------------------------------------------------


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


def test_dealer_tries_to_connect_again_at_least_every_two_seconds(router: RouterChannel) -> None:
    assert dealer(router)._socket.getsockopt(zmq.RECONNECT_IVL_MAX) == 2000
