"""A hanging broadcast in a shared group, as over NCCL: control flow only, without a GPU."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from learner.weights import push as push_module
from learner.weights.push import PushReport, WeightPusher
from learner.weights.rendezvous import NcclRendezvous
from protocol.weights.controls import FIRST_TURN, Attempt
from protocol.weights.wire import TensorMeta
from tests.fakes.planned_weights import plan_buckets

PLAN = plan_buckets([TensorMeta("a", "float32", (4,))], 1 << 20)
SILENCE_S = 0.5


class FakeGroup:
    """A group in which every server takes what is sent; a broadcast is stuck while one of them is."""

    device = "cpu"

    def __init__(self) -> None:
        self.is_stuck = threading.Event()
        self.is_closed = threading.Event()

    def broadcast(self, flat: torch.Tensor) -> None:
        if self.is_stuck.is_set():
            self.is_closed.wait(60.0)
            raise RuntimeError("aborted")

    def close(self) -> None:
        self.is_closed.set()


class Server:
    """Accepts every call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inits: list[dict[str, Any]] = []
        self.version: int | None = None

    async def ping(self) -> None:
        pass

    async def join_weights(self, attempt: Attempt, init: dict[str, Any], timeout_s: float) -> None:
        self.inits.append(init)

    async def prepare(self, attempt: Attempt, update: dict[str, Any]) -> None:
        pass

    async def receive(self, attempt: Attempt) -> None:
        pass

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        self.version = version
        return 0.0

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        return []

    async def serve(self, attempt: Attempt, version: int) -> None:
        pass

    async def leave(self, attempt: Attempt) -> None:
        pass


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[FakeGroup]:
    """The groups that the learner's half met, which needs a GPU otherwise."""
    met: list[FakeGroup] = []

    def join(self: NcclRendezvous) -> FakeGroup:
        met.append(FakeGroup())
        return met[-1]

    monkeypatch.setattr(NcclRendezvous, "join", join)
    monkeypatch.setattr(push_module, "device_of", lambda backend: "cpu")
    return met


@pytest.fixture
def servers() -> list[Server]:
    return [Server("a"), Server("b"), Server("c")]


@pytest.fixture
def pusher(groups: list[FakeGroup], servers: list[Server]) -> Iterator[WeightPusher]:
    pusher = WeightPusher(servers, "127.0.0.1", "nccl", 60.0, workers_per_server=2, silence_s=SILENCE_S)
    yield pusher
    pusher.close()


def _push(pusher: WeightPusher, version: int) -> PushReport:
    return pusher.push(version, PLAN, iter([[("a", torch.zeros(4))]]))


def test_group_that_is_given_up_is_closed_while_a_broadcast_is_stuck_in_it(
    pusher: WeightPusher, servers: list[Server], groups: list[FakeGroup]
) -> None:
    _push(pusher, 1)
    groups[0].is_stuck.set()

    async def wait_in_the_broadcast(attempt: Attempt) -> None:
        await asyncio.sleep(3600)

    async def die(attempt: Attempt) -> None:
        raise ConnectionError("its process ended")

    servers[0].receive = servers[1].receive = wait_in_the_broadcast  # type: ignore[method-assign]
    servers[2].receive = die  # type: ignore[method-assign]
    started = time.monotonic()
    report = _push(pusher, 2)

    assert report.synced == ()
    assert report.failed["c"] == "c failed to receive: its process ended"
    assert groups[0].is_closed.wait(20.0)
    assert time.monotonic() - started < 30.0  # the deadline is 60 s


def test_broadcast_that_hangs_although_every_server_has_received_fails_at_the_deadline(
    groups: list[FakeGroup], servers: list[Server]
) -> None:
    pusher = WeightPusher(servers, "127.0.0.1", "nccl", 1.0, workers_per_server=2)
    _push(pusher, 1)
    groups[0].is_stuck.set()
    started = time.monotonic()
    report = _push(pusher, 2)
    pusher.close()

    assert "did not take a bucket within 1.0 s" in report.failed["a"]
    assert time.monotonic() - started < 30.0


def test_first_turn_of_a_pusher_follows_the_one_in_which_a_server_attached(
    pusher: WeightPusher, servers: list[Server]
) -> None:
    turns: list[Attempt] = []

    async def sleep(attempt: Attempt) -> None:
        turns.append(attempt)

    _push(pusher, 1)
    for server in servers:
        server.sleep = sleep  # type: ignore[attr-defined]
    failed = pusher.switch("sleep")

    assert failed == {}
    assert {number for _, number in turns} == {FIRST_TURN + 1}


def test_others_meet_anew_at_once_without_one_that_fell_silent(
    pusher: WeightPusher, servers: list[Server], groups: list[FakeGroup]
) -> None:
    _push(pusher, 1)

    async def hang(*arguments: Any) -> None:
        await asyncio.sleep(3600)

    servers[1].ping = servers[1].prepare = hang  # type: ignore[method-assign]
    broken = _push(pusher, 2)
    end = time.monotonic() + 30.0
    while len(servers[0].inits) < 2 and time.monotonic() < end:  # no push in between
        time.sleep(0.02)

    assert "b answered no ping for 0.5 s while it was to prepare" in broken.failed["b"]
    assert [server.inits[-1]["world_size"] for server in servers] == [5, 7, 5]
