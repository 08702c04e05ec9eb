"""Pushes on shared devices: each worker of the servers takes the weights from the rank on its own card."""

import gc
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue
from threading import Barrier

import pytest
import torch

from learner.weights.card import OwnCard
from learner.weights.push import PushReport, WeightPusher
from tests.learner.weights.fake_server import FakeServer
from tests.learner.weights.pushing import METAS, PLAN, holds, push_until_synced, weights

# A cut join of a fake server leaves its connections to the garbage collector, as a process that ends does;
# the fixture collects them, so that no other test is blamed for them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NUM_WORKERS = 2
_DEADLINE_S = 20.0


class Ranks:
    """Four ranks in one process, which share two servers' cards: rank 0 directs, and the others pass buckets on.

    As in ZeRO 3 all gather each bucket together.
    """

    def __init__(self, *servers: FakeServer, deadline_s: float = _DEADLINE_S) -> None:
        name = secrets.token_hex(8)
        self._named: list[Queue[Sequence[str]]] = [Queue() for _ in range(NUM_WORKERS * len(servers))]
        self._cards = [
            OwnCard(name, rank, deadline_s, self._tell if rank == 0 else lambda _, own=own: own.get())
            for rank, own in enumerate(self._named)
        ]
        self._threads = ThreadPoolExecutor(len(self._cards))
        self._gathering = Barrier(len(self._cards), timeout=_DEADLINE_S)
        self.gather_s = 0.0
        self.off_by_one: set[int] = set()  # ranks with other weights
        self.pusher = WeightPusher(
            servers, "127.0.0.1", "ipc", deadline_s, NUM_WORKERS, silence_s=10.0, card=self._cards[0]
        )

    def push(self, version: int) -> PushReport:
        others: list[Future[None]] = [
            self._threads.submit(card.pass_on, PLAN, self._gathered(version, rank))
            for rank, card in enumerate(self._cards)
            if rank
        ]
        report = self.pusher.push(version, PLAN, self._gathered(version, 0))
        for other in others:
            other.result(_DEADLINE_S)
        return report

    def close(self) -> None:
        self.pusher.close()
        for card in self._cards:
            card.close()
        self._threads.shutdown()

    def _tell(self, names: Sequence[str]) -> Sequence[str]:
        for queue in self._named[1:]:
            queue.put(names)
        return names

    def _gathered(self, version: int, rank: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        named = list(weights(float(version + (rank in self.off_by_one))).items())
        assert len(named) == len(METAS)
        for bucket in (named[:1], named[1:]):
            self._gathering.wait()
            time.sleep(self.gather_s)
            yield bucket


@pytest.fixture
def servers() -> list[FakeServer]:
    return [FakeServer("one", num_workers=NUM_WORKERS), FakeServer("other", num_workers=NUM_WORKERS)]


@pytest.fixture
def ranks(servers: list[FakeServer]) -> Iterator[Ranks]:
    made = Ranks(*servers)
    yield made
    made.close()
    for server in servers:  # as a process that ends
        server._lose_groups()
    gc.collect()


def test_every_worker_of_every_server_takes_the_weights_of_the_rank_on_its_card(
    ranks: Ranks, servers: list[FakeServer]
) -> None:
    assert [ranks.push(version).synced for version in (1, 2)] == [("one", "other")] * 2
    assert [holds(server, 2) for server in servers] == [True, True]


def test_a_rank_with_other_weights_than_rank_0_is_found_by_the_digest_and_named_by_its_server(ranks: Ranks) -> None:
    ranks.off_by_one = {3}
    report = ranks.push(1)
    assert report.synced == ("one",)
    assert "weight digest differs" in report.failed["other"]


def test_ranks_of_a_server_that_fails_before_it_is_ready_do_not_wait_for_it(
    ranks: Ranks, servers: list[FakeServer]
) -> None:
    ranks.push(1)
    servers[1].fault = ("prepare", "lose a peer")  # its workers keep their connections
    begun = time.monotonic()
    assert ranks.push(2).synced == ("one",)
    assert time.monotonic() - begun < _DEADLINE_S / 2


def test_workers_of_other_ranks_wait_longer_than_a_rank_for_its_late_worker(servers: list[FakeServer]) -> None:
    ranks = Ranks(*servers, deadline_s=1.0)
    ranks.push(1)
    ranks.gather_s = 0.2
    servers[1].fault = ("receive", "hang")
    assert ranks.push(2).synced == ("one",)
    ranks.close()


@pytest.mark.parametrize("state", ["join", "prepare", "receive", "bucket", "commit"])
def test_a_server_that_dies_in_any_state_costs_only_itself_and_is_back_with_a_later_push(
    ranks: Ranks, servers: list[FakeServer], state: str
) -> None:
    good, bad = servers
    if state != "join":
        ranks.push(1)
    bad.fault = (state, "raise")
    broken = ranks.push(2)
    bad.fault = None
    version = push_until_synced(ranks.push, 2, "one", "other")
    assert (broken.synced, [*broken.failed]) == (("one",), ["other"])
    assert holds(good, version)
    assert holds(bad, version)
