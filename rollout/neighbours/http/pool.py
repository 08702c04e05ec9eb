"""Kept connections to one service, each inside an httpx client of its own.

One httpx client with many connections looks at all of them whenever a request starts or ends: measured on loopback,
128 requests at once over it took 1 to 3 s of processor time, which is taken from the engine.
"""

import functools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

# Below uvicorn's default of 5 s: a connection that the server is about to close is not used again.
_KEEPALIVE_S = 4.0


class HttpPool:
    """Gives out clients, the one used last first, so that few stay connected. It sets no limit: callers do."""

    def __init__(self, connect_timeout_s: float) -> None:
        # The caller bounds the attempt as a whole.
        self._timeout = httpx.Timeout(None, connect=connect_timeout_s)
        self._idle: list[httpx.AsyncClient] = []
        self._all: set[httpx.AsyncClient] = set()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Yield a client that nobody else uses inside the block."""
        client = self._idle.pop() if self._idle else self._open()
        try:
            yield client
        except BaseException:
            # A request broken off can leave its connection taken for ever inside the client. The client used last is
            # used next: every further attempt would wait for that connection, and the service would never seem up.
            self._all.discard(client)
            await client.aclose()
            raise
        self._idle.append(client)

    async def close(self) -> None:
        # Requests that were broken off may still be leaving, and take their clients out meanwhile.
        for client in tuple(self._all):
            await client.aclose()

    def _open(self) -> httpx.AsyncClient:
        """Return a new client. Proxies and netrc of the environment are not used, redirects not followed."""
        limits = httpx.Limits(max_connections=1, keepalive_expiry=_KEEPALIVE_S)
        client = httpx.AsyncClient(limits=limits, timeout=self._timeout, trust_env=False, verify=_trusted())
        self._all.add(client)
        return client


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the certificates to trust; shared, since reading them takes tens of milliseconds."""
    return httpx.create_ssl_context(trust_env=False)
