"""Calls to several servers: who is at fault, within which time, and what is left running."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from learner.weights.link import Fault, Limits, ask, ask_all
from protocol.weights.controls import ServerControls
from protocol.weights.group import PEER_LOST, PeerLostError
from tests.learner.weights.fake_server import FakeServer

SILENCE_S = 0.2
LIMITS = Limits(60.0, SILENCE_S)
SILENT = "{} answered no ping for 0.2 s while it was to work"


class Unreachable(FakeServer):
    async def ping(self) -> None:
        raise OSError("no route to host")


class Shaky(FakeServer):
    number = 0

    async def ping(self) -> None:
        self.number += 1
        if self.number % 3:
            raise OSError("no route to host")


def _lasts(seconds: float, error: Exception | None = None) -> Callable[[ServerControls], Coroutine[Any, Any, None]]:
    async def call(server: ServerControls) -> None:
        await asyncio.sleep(seconds)
        if error is not None:
            raise error

    return call


@pytest.mark.parametrize("kind", [FakeServer, Shaky])
async def test_call_may_last_longer_than_the_silence_limit_while_pings_are_answered(kind: type[FakeServer]) -> None:
    assert await ask_all([kind("a"), kind("b")], "work", _lasts(3 * SILENCE_S), LIMITS) == {}


async def test_silent_servers_are_named_whether_their_pings_hang_or_fail() -> None:
    servers = [FakeServer("a"), Unreachable("b"), FakeServer("c")]
    servers[0].is_silent = True
    start = time.monotonic()
    faults = await ask_all(servers, "work", _lasts(3.0), LIMITS)

    assert faults == {name: Fault(SILENT.format(name)) for name in ("a", "b")}
    joint = await ask_all(servers, "work", _lasts(60.0), LIMITS, is_joint=True)
    assert joint.keys() == {"a", "b"}
    assert time.monotonic() - start < 30.0


async def test_server_that_falls_silent_later_is_noticed() -> None:
    server = FakeServer("a")
    asyncio.get_running_loop().call_later(2 * SILENCE_S, setattr, server, "is_silent", True)
    assert await ask(server, "work", _lasts(60.0), LIMITS) == Fault(SILENT.format("a"))


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ValueError("wrong\nsecond line"), Fault("a failed to work: wrong")),
        (PeerLostError(PEER_LOST, "closed"), Fault(f"a failed to work: {PEER_LOST}: closed", is_own=False)),
    ],
)
async def test_error_of_a_call_is_its_fault_unless_it_lost_a_peer(error: Exception, fault: Fault) -> None:
    assert await ask(Unreachable("a"), "work", _lasts(SILENCE_S / 4, error), LIMITS) == fault


async def test_call_that_lasts_too_long_is_a_fault() -> None:
    assert await ask(FakeServer("a"), "work", _lasts(60.0), Limits(0.05)) == Fault("a did not work within 0.05 s")


async def test_joint_calls_end_shortly_after_the_first_failure_and_others_run_on() -> None:
    async def call(server: ServerControls) -> None:
        await _lasts(0.0 if server.name == "a" else 1.0, ValueError("wrong"))(server)

    servers = [FakeServer("a"), FakeServer("b")]
    assert set(await ask_all(servers, "work", call, Limits(60.0), is_joint=True)) == {"a"}
    assert set(await ask_all(servers, "work", call, Limits(60.0))) == {"a", "b"}


async def test_time_in_which_this_process_stood_still_is_no_silence() -> None:
    class Late(FakeServer):
        async def ping(self) -> None:
            await asyncio.sleep(0.01)

    async def work(server: ServerControls) -> None:
        for _ in range(3):
            await asyncio.sleep(0.02)
            time.sleep(3 * SILENCE_S)  # this is the standing still

    assert await ask(Late("a"), "work", work, LIMITS) is None


async def test_nothing_is_left_running_however_it_ends() -> None:
    before = len(asyncio.all_tasks())
    for _ in range(200):
        await ask_all([FakeServer("a")], "work", _lasts(0.0), LIMITS)
    task = asyncio.ensure_future(ask_all([FakeServer("a")], "work", _lasts(60.0), LIMITS))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert len(asyncio.all_tasks()) == before
