"""Kept connections: closing them while requests are still leaving."""

import asyncio

import pytest

from rollout.neighbours.http.pool import HttpPool
from tests.fakes.http_servers import Answer, scripted_server


async def test_pool_closes_while_requests_that_were_broken_off_are_leaving() -> None:
    with scripted_server() as server:
        url = server.script("slow", Answer({}, delay_s=30.0))
        pool = HttpPool(connect_timeout_s=2.0)

        async def ask() -> None:
            async with pool.client() as client:
                await client.post(url, json={})

        requests = [asyncio.create_task(ask()) for _ in range(8)]
        async with asyncio.timeout(60.0):
            while len(server.received["slow"]) < 8:
                await asyncio.sleep(0.005)
        for request in requests:
            request.cancel()
        closing = asyncio.create_task(pool.close())
        await asyncio.wait([closing, *requests])
        assert closing.exception() is None


async def test_client_of_a_request_that_was_broken_off_is_not_used_again() -> None:
    pool = HttpPool(connect_timeout_s=2.0)
    async with pool.client() as sound:
        pass
    with pytest.raises(TimeoutError):
        async with pool.client() as broken_off:
            raise TimeoutError
    assert broken_off is sound
    async with pool.client() as next_one:
        assert next_one is not broken_off
    assert broken_off.is_closed
    await pool.close()
