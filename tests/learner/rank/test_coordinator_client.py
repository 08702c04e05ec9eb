"""What a rank is answered: how long it has patience, and for what."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from learner.rank.coordinator_client import CoordinatorClient
from protocol.errors import NeighbourError
from protocol.wire import messages as m
from protocol.wire.channel import DealerChannel, KeyPair, RouterChannel
from protocol.wire.codec import Decoder, encode

KEYS, PEER_KEYS = KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair())
STAMP: dict[str, Any] = {"run_id": "r1", "incarnation": 1}


class Answering:
    """A coordinator that answers a rank's questions by script, each after a moment; the last answer for ever."""

    def __init__(self, *answers: m.Message, after_s: float) -> None:
        self.num_asked = 0
        self._answers = answers
        self._after_s = after_s
        self._router = RouterChannel("127.0.0.1", KEYS, [PEER_KEYS.public])
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer_all)
        self._thread.start()
        self.channel = DealerChannel(self._router.address, "rank-0", PEER_KEYS, KEYS.public)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.channel.close()

    def _answer_all(self) -> None:
        decoder: Decoder[m.Message] = Decoder(m.ToCoordinator)
        while not self._over.is_set():
            if (arrived := self._router.receive(0.02)) is None:
                continue
            question, _ = decoder.decode(arrived[1])
            answer = self._answers[min(self.num_asked, len(self._answers) - 1)]
            self.num_asked += 1
            self._over.wait(self._after_s)
            self._router.send(arrived[0], encode(msgspec.structs.replace(answer, request=question.request)))
        self._router.close()


@pytest.fixture
def made() -> Iterator[list[Answering]]:
    """Yield a list for the coordinators that a test makes."""
    coordinators: list[Answering] = []
    yield coordinators
    for coordinator in coordinators:
        coordinator.close()


EVALUATING = m.Wait(
    **STAMP, detail="waits for the evaluation of step 0: 1 of 2 prompts are back", is_for_evaluation=True
)
LACKING = m.Wait(**STAMP, detail="step 1 waits for 2 groups on s1")
OVER = m.RunEnd(**STAMP, step=1, detail="all steps are done")


def test_time_in_which_an_evaluation_is_awaited_counts_for_nothing(made: list[Answering]) -> None:
    made.append(coordinator := Answering(*[EVALUATING] * 12, LACKING, OVER, after_s=0.1))
    client = CoordinatorClient(coordinator.channel, "r1", 1)
    assert client.next_batch(1, 0, timeout_s=1.0) == "all steps are done"
    assert coordinator.num_asked == 14


def test_time_limit_restarts_after_an_evaluation(made: list[Answering]) -> None:
    made.append(coordinator := Answering(EVALUATING, EVALUATING, LACKING, after_s=0.1))
    client = CoordinatorClient(coordinator.channel, "r1", 1)
    begun = time.monotonic()
    with pytest.raises(
        NeighbourError, match=r"no batch for step 1 within .* = 0.25 s: step 1 waits for 2 groups on s1$"
    ):
        client.next_batch(1, 0, timeout_s=0.25)
    assert time.monotonic() - begun >= 2 * 0.1 + 0.25


def test_error_of_a_wait_in_several_calls_names_the_whole_limit(made: list[Answering]) -> None:
    made.append(coordinator := Answering(LACKING, after_s=0.02))
    with pytest.raises(NeighbourError, match=r"no batch for step 1 within .* = 60 s: step 1 waits"):
        CoordinatorClient(coordinator.channel, "r1", 1).next_batch(1, 0, timeout_s=60.0, waited_s=59.9)


def test_answer_of_another_kind_is_the_coordinators_failure(made: list[Answering]) -> None:
    made.append(coordinator := Answering(m.Done(**STAMP), after_s=0.0))
    with pytest.raises(NeighbourError, match="answered NextBatch with Done"):
        CoordinatorClient(coordinator.channel, "r1", 1).next_batch(1, 0, timeout_s=1.0)
