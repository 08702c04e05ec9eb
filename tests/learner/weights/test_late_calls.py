"""A transport that loses an answer and brings the call itself late, when the learner's next attempt has begun."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from learner.weights.push import PushReport, WeightPusher
from protocol.errors import NeighbourError
from protocol.weights.controls import VERBS
from protocol.weights.wire import TensorMeta
from rollout.server import RolloutServer
from tests.chaos.rig.memory_engine import MemoryEngine
from tests.chaos.rig.processes import ENGINE
from tests.fakes.planned_weights import plan_buckets
from tests.fakes.waiting import wait_until

PLAN = plan_buckets([TensorMeta("a", "float32", (64,)), TensorMeta("b", "float32", (64,))], 256)
SERVER = "server"


class LateLine:
    """A server's weight controls. loses: the verb whose next call comes late. brings_at: before which verb it comes."""

    name = SERVER

    def __init__(self, server: RolloutServer, loop: asyncio.AbstractEventLoop) -> None:
        self.loses = self.brings_at = ""
        self.outcome: Future[Any] | None = None  # of the call that came late
        self._late: Any = None
        self._server = server
        self._loop = loop

    def __getattr__(self, verb: str) -> Any:
        if verb not in VERBS:
            raise AttributeError(verb)

        async def call(*arguments: Any) -> Any:
            if verb == self.loses:
                self.loses, self._late = "", (verb, arguments)
                raise ConnectionError("the answer was lost")
            if verb == self.brings_at:
                self.bring()
            return await asyncio.wrap_future(self._call(verb, arguments))

        return call

    def bring(self) -> None:
        """Bring the late call; nobody waits for its answer."""
        self.brings_at = ""
        self.outcome = self._call(*self._late)

    def _call(self, verb: str, arguments: tuple[Any, ...]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(getattr(self._server, verb)(*arguments), self._loop)


@pytest.fixture
def line() -> Iterator[LateLine]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    engine = MemoryEngine(1)

    async def start(_: object) -> MemoryEngine:
        return engine

    server = RolloutServer(SERVER, ENGINE, start)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    yield LateLine(server, loop)
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def pusher(line: LateLine) -> Iterator[WeightPusher]:
    pusher = WeightPusher([line], "127.0.0.1", "gloo", 60.0, silence_s=60.0)
    yield pusher
    pusher.close()


def push(pusher: WeightPusher, version: int) -> tuple[PushReport, dict[str, str]]:
    gathered = iter([[(name, torch.full((64,), float(version)))] for name in "ab"])
    return pusher.push(version, PLAN, gathered), pusher.verify(version, [1, 2])


def lose(pusher: WeightPusher, line: LateLine, verb: str) -> None:
    """Have a call be lost, and the server be joined anew."""
    line.loses = verb
    if verb == "leave":
        pusher.set_servers([])
        pusher.set_servers([line])
    else:
        if verb == "join_weights":
            pusher._loop.call_soon_threadsafe(pusher._links[0].drop)
        push(pusher, 2)
        if verb == "join_weights":
            push(pusher, 2)  # the join in its background was lost
    if verb != "leave":
        wait_until(lambda: pusher._links[0].is_joined, 60.0)
    assert line.loses == ""


@pytest.mark.parametrize("brings_at", ["", "receive"])
@pytest.mark.parametrize("verb", ["join_weights", "prepare", "receive", "commit", "probe", "serve", "leave"])
def test_call_that_comes_late_costs_no_later_push(
    pusher: WeightPusher, line: LateLine, verb: str, brings_at: str
) -> None:
    first = push(pusher, 1)
    lose(pusher, line, verb)
    if verb == "leave":
        push(pusher, 2)  # joins
    line.brings_at = brings_at
    if not brings_at:
        line.bring()
    report, faults = push(pusher, 3)

    assert (first[0].synced, first[1]) == ((SERVER,), {})
    assert (report.synced, report.failed, faults) == ((SERVER,), {}, {})
    assert line.outcome is not None
    assert isinstance(refused := line.outcome.exception(60.0), NeighbourError)
    assert "of the learner is over" in refused.detail
