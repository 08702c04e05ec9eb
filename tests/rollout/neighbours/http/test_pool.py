"""Kept connections: closing them while requests are still leaving."""

import asyncio

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
