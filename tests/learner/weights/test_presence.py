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


class Unreachable(FakeServer):
    async def ping(self) -> None:
        raise OSError("no route to host")


async def test_server_whose_pings_fail_is_the_works_to_tell_of_where_that_fails_too() -> None:
    async def fail() -> None:
        await asyncio.sleep(SILENCE_S / 4)
        raise ConnectionError("actor died")

    with pytest.raises(ConnectionError, match="actor died"):
        await while_present([Unreachable("a")], 100 * SILENCE_S, fail())


async def test_server_whose_pings_fail_is_silent_where_the_work_hangs() -> None:
    with pytest.raises(SilentServersError, match=r"^a answered no ping for 0.2 s$"):
        await while_present([Unreachable("a"), FakeServer("b")], SILENCE_S, _work(60.0))


async def test_a_ping_that_fails_now_and_then_is_no_silence() -> None:
    class Shaky(FakeServer):
        number = 0

        async def ping(self) -> None:
            self.number += 1
            if self.number % 3:
                raise OSError("no route to host")

    assert await while_present([Shaky("a")], SILENCE_S, _work(3 * SILENCE_S)) == "done"


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
