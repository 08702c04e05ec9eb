"""Buckets between processes of one machine: what arrives, and what becomes of a peer that is gone.

`tests.gpu.prove` has a receiver in another process.
"""

import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from protocol.weights.group import PeerLostError
from protocol.weights.same_machine import SameMachineGroup, listen_here

DEADLINE_S = 30.0
SIZES = (1000, 0, 70_000, 16)


def bucket(number: int, size: int) -> torch.Tensor:
    return torch.arange(number, number + size, dtype=torch.int64).to(torch.uint8)


@pytest.fixture
def pair() -> Iterator[tuple[SameMachineGroup, SameMachineGroup]]:
    """Yield a sender and a receiver, in this process."""
    name = secrets.token_hex(8)
    with listen_here(name) as listener, ThreadPoolExecutor(1) as other:
        receiver = other.submit(SameMachineGroup.receive, name, DEADLINE_S)
        groups = SameMachineGroup.send(listener, 1, DEADLINE_S), receiver.result()
    yield groups
    for group in groups:
        group.close()


def test_every_bucket_reaches_every_receiver_whole() -> None:
    name = secrets.token_hex(8)

    def take_buckets() -> list[bool]:
        group = SameMachineGroup.receive(name, DEADLINE_S)
        taken = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
        for flat in taken:
            group.broadcast(flat)
        group.close()
        return [torch.equal(flat, bucket(number, flat.numel())) for number, flat in enumerate(taken)]

    with listen_here(name) as listener, ThreadPoolExecutor(2) as receivers:
        whole = [receivers.submit(take_buckets) for _ in range(2)]
        group = SameMachineGroup.send(listener, 2, DEADLINE_S)
        for number, size in enumerate(SIZES):
            group.broadcast(bucket(number, size))
        assert [found.result() for found in whole] == [[True] * len(SIZES)] * 2
    group.close()


def test_a_bucket_is_not_seen_to_change_after_it_was_taken(pair: tuple[SameMachineGroup, SameMachineGroup]) -> None:
    sender, receiver = pair
    first, second = torch.empty(8, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as other:
        taken = other.submit(lambda: [receiver.broadcast(flat) for flat in (first, second)])
        for value in (1, 2):
            sender.broadcast(torch.full((8,), value, dtype=torch.uint8))
        taken.result()

    assert (first.tolist(), second.tolist()) == ([1] * 8, [2] * 8)


def test_a_sender_whose_receiver_is_gone_fails_at_once(pair: tuple[SameMachineGroup, SameMachineGroup]) -> None:
    sender, receiver = pair
    receiver.close()
    with pytest.raises(PeerLostError):
        sender.broadcast(torch.zeros(8, dtype=torch.uint8))


def test_a_receiver_that_waits_fails_when_the_sender_gives_up(pair: tuple[SameMachineGroup, SameMachineGroup]) -> None:
    sender, receiver = pair
    threading.Timer(0.05, sender.close).start()
    with pytest.raises(PeerLostError, match="group: the connection was closed"):
        receiver.broadcast(torch.zeros(8, dtype=torch.uint8))


def test_a_sender_that_is_closed_while_it_waits_ends(pair: tuple[SameMachineGroup, SameMachineGroup]) -> None:
    sender, _ = pair
    threading.Timer(0.05, sender.close).start()
    with pytest.raises(PeerLostError):
        sender.broadcast(torch.zeros(8, dtype=torch.uint8))


def test_a_receiver_that_never_comes_is_awaited_until_the_deadline() -> None:
    with listen_here(secrets.token_hex(8)) as listener, pytest.raises(TimeoutError):
        SameMachineGroup.send(listener, 1, 0.05)


def test_a_bucket_of_another_size_is_refused(pair: tuple[SameMachineGroup, SameMachineGroup]) -> None:
    sender, receiver = pair
    with ThreadPoolExecutor(1) as other:
        sending = other.submit(sender.broadcast, torch.zeros(8, dtype=torch.uint8))
        with pytest.raises(PeerLostError, match="a bucket of 8 bytes, expected 9"):
            receiver.broadcast(torch.zeros(9, dtype=torch.uint8))
        receiver.close()
        assert isinstance(sending.exception(), PeerLostError)


def test_receiver_without_the_buckets_descriptor_fails() -> None:
    """The kernel drops the descriptor when the receiver cannot open another file."""
    sender, own = socket.socketpair()
    sender.sendall(bytes(8))
    with sender, pytest.raises(PeerLostError, match="cannot open another file"):
        SameMachineGroup([own], DEADLINE_S, is_sender=False).broadcast(torch.zeros(8, dtype=torch.uint8))
    own.close()


def test_nothing_is_left_open_after_a_group() -> None:
    name = secrets.token_hex(8)
    listen_here(name).close()
    listen_here(name).close()  # the name is free again

    with pytest.raises(ConnectionError, match="no learner of this machine"):
        SameMachineGroup.receive(name, DEADLINE_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(f"\0sluice-weights-{name}")
