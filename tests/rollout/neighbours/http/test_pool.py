"""Posts over kept connections: what is read of an answer, and requests that are broken off."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollout.neighbours.http.pool import HttpPool, NoAnswer
from tests.fakes.http_servers import Answer, free_address, scripted_server, serving

LIMITS = (100, 20)


async def test_pool_closes_while_requests_that_were_broken_off_are_leaving() -> None:
    with scripted_server() as server:
        url = server.script("slow", Answer({}, delay_s=30.0))
        pool = HttpPool(connect_timeout_s=2.0)
        requests = [asyncio.create_task(pool.post(url, b"{}", {}, LIMITS)) for _ in range(8)]
        async with asyncio.timeout(60.0):
            while len(server.received["slow"]) < 8:
                await asyncio.sleep(0.005)
        for request in requests:
            request.cancel()
        closing = asyncio.create_task(pool.close())
        await asyncio.wait([closing, *requests])
        assert closing.exception() is None


async def test_request_after_one_that_was_broken_off_gets_its_own_answer() -> None:
    with scripted_server() as server:
        late = server.script("late", Answer("late", delay_s=1.0))
        pool = HttpPool(connect_timeout_s=2.0)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.post(late, b"{}", {}, LIMITS), 0.05)
            assert (await pool.post(server.script("now", Answer("now")), b"{}", {}, LIMITS)).body == b'"now"'
        await pool.close()


async def test_answer_is_read_up_to_the_limit_of_its_status() -> None:
    with scripted_server() as server:
        pool = HttpPool(connect_timeout_s=2.0)
        for status, size, is_whole in [(200, 100, True), (200, 101, False), (500, 20, True), (500, 21, False)]:
            url = server.script("sized", Answer(b"x" * size, status))
            answer = await pool.post(url, b"{}", {}, LIMITS)
            assert (answer.status, answer.is_whole) == (status, is_whole)
        endless = await pool.post(server.script("endless", Answer(b"x" * 10_000_000)), b"{}", {}, LIMITS)
        assert (endless.is_whole, len(endless.body) < 1_000_000) == (False, True)
        await pool.close()


async def test_url_is_used_as_given_and_cookies_are_not_kept() -> None:
    asked: list[tuple[str, str, str | None]] = []

    async def answer(request: Request) -> Response:
        asked.append((request.scope["raw_path"].decode(), request.url.query, request.headers.get("cookie")))
        return Response("x", headers={"set-cookie": "who=me"})

    pool = HttpPool(connect_timeout_s=2.0)
    with serving(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as address:
        for _ in range(2):
            assert (await pool.post(f"{address}/a%2Fb?key=%41+b", b"{}", {}, LIMITS)).body == b"x"
        await pool.close()
    assert asked == [("/a%2Fb", "key=%41+b", None)] * 2


async def test_service_that_is_not_there_is_named() -> None:
    pool = HttpPool(connect_timeout_s=2.0)
    with pytest.raises(NoAnswer, match=r"no connection \(Connect call failed"):
        await pool.post(free_address(), b"{}", {}, LIMITS)
    with pytest.raises(NoAnswer, match=r"no connection \(.*(not known|resolution)"):
        await pool.post("http://nobody.invalid/", b"{}", {}, LIMITS)
    await pool.close()
