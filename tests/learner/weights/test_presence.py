"""Watching servers while something is awaited of them."""

import asyncio
import time

import pytest

from learner.weights.presence import SilentServersError, while_present
from tests.learner.weights.fake_server import FakeServer

SILENCE_S = 0.2


async def _work(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def test_work_is_awaited_for_longer_than_the_limit_while_all_answer() -> None:
    servers = [FakeServer("a"), FakeServer("b")]

    assert await while_present(servers, SILENCE_S, _work(3 * SILENCE_S)) == "done"


async def test_silent_servers_end_the_work_and_are_named() -> None:
    servers = [FakeServer("a"), FakeServer("b"), FakeServer("c")]
    servers[0].is_silent = servers[2].is_silent = True
    start = time.monotonic()
    with pytest.raises(SilentServersError, match=r"^a, c answered no ping for 0.2 s$") as raised:
        await while_present(servers, SILENCE_S, _work(60.0))

    assert raised.value.names == ("a", "c")
    assert SILENCE_S * 0.9 <= time.monotonic() - start < 30.0


async def test_server_that_falls_silent_later_is_noticed() -> None:
    server = FakeServer("a")
    asyncio.get_running_loop().call_later(2 * SILENCE_S, setattr, server, "is_silent", True)
    with pytest.raises(SilentServersError):
        await while_present([server], SILENCE_S, _work(60.0))


async def test_server_whose_ping_fails_is_left_to_the_work_to_tell_of() -> None:
    class Gone(FakeServer):
        async def ping(self) -> None:
            raise ConnectionError("actor died")

    assert await while_present([Gone("a")], SILENCE_S, _work(3 * SILENCE_S)) == "done"


async def test_time_in_which_this_process_stood_still_is_no_silence() -> None:
    class Late(FakeServer):
        async def ping(self) -> None:
            await asyncio.sleep(0.01)

    async def work() -> str:
        for _ in range(3):
            await asyncio.sleep(0.02)
            time.sleep(3 * SILENCE_S)  # this is the standing still
        return "done"

    assert await while_present([Late("a")], SILENCE_S, work()) == "done"


async def test_what_the_work_raises_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await while_present([FakeServer("a")], SILENCE_S, fail())


async def test_nothing_is_left_running_however_it_ends() -> None:
    before = len(asyncio.all_tasks())
    for _ in range(200):
        await while_present([FakeServer("a")], SILENCE_S, _work(0.0))
    task = asyncio.ensure_future(while_present([FakeServer("a")], SILENCE_S, _work(60.0)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert len(asyncio.all_tasks()) == before
