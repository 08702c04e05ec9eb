"""A broadcast over NCCL, whose kernels have no deadline: in shape, with a pretended stream and communicator."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.weights.group import PEER_LOST, NcclGroup, PeerLostError, in_thread, nccl_broadcast


class Communicator:
    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def broadcast(self, flat: torch.Tensor, src: int, stream: Any) -> None:
        self.calls.append(("broadcast", stream.name))

    def destroy(self) -> None:
        self.calls.append(("destroy", None))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[bool]], None]:
    """Pretend a stream, on which an event answers in turn whether it is done; the last answer repeats."""

    def use(answers: list[bool]) -> None:
        recorded: list[str] = []

        def query() -> bool:
            assert recorded == ["side"]
            return answers.pop(0) if len(answers) > 1 else answers[0]

        event = SimpleNamespace(record=lambda stream: recorded.append(stream.name), query=query)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(name="side"))
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)

    return use


def test_a_broadcast_ends_when_its_stream_has_done_it(pretend: Callable[[list[bool]], None]) -> None:
    pretend([False, False, True])
    communicator = Communicator()
    nccl_broadcast(communicator, torch.zeros(1), 5.0)

    assert communicator.calls == [("broadcast", "side")]


def test_a_broadcast_whose_peer_is_lost_is_aborted_at_its_deadline(pretend: Callable[[list[bool]], None]) -> None:
    pretend([False])
    communicator = Communicator()
    with pytest.raises(PeerLostError, match=f"{PEER_LOST}.*did not end within 0.02 s"):
        nccl_broadcast(communicator, torch.zeros(1), 0.02)

    assert communicator.calls == [("broadcast", "side"), ("destroy", None)]


def test_a_communicator_that_its_link_closes_at_the_deadline_of_a_broadcast_is_aborted_once(
    pretend: Callable[[list[bool]], None],
) -> None:
    class LikeVllm(Communicator):
        is_available = True

        def destroy(self) -> None:
            if self.is_available:
                super().destroy()
                time.sleep(0.2)  # NCCL waits for its kernels
                self.is_available = False

    pretend([False])
    group = NcclGroup.__new__(NcclGroup)
    group._communicator, group._deadline_s, group._closing = LikeVllm(), 0.02, threading.Lock()
    late = in_thread("link", lambda: group.broadcast(torch.zeros(1)))
    while len(group._communicator.calls) < 2:
        time.sleep(0.001)
    group.close()
    assert isinstance(late.exception(5.0), PeerLostError)
    assert group._communicator.calls == [("broadcast", "side"), ("destroy", None)]
