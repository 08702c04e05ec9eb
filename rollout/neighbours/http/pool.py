"""POST over kept connections: what came back, read up to a limit.

Through aiohttp: a request costs a fraction of what httpx takes for one, and a rollout server makes several for each
trajectory in the process that feeds its engine.
"""

import functools
import io
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import certifi
import yarl

# Below uvicorn's default of 5 s: a connection that the server is about to close is not used again.
_KEEPALIVE_S = 4.0


class NoAnswer(Exception):
    """No whole answer came: no connection, or one that broke."""


@dataclass(frozen=True)
class Answer:
    """What a service answered."""

    status: int  # HTTP status
    headers: Mapping[str, str]  # by name, in any case
    body: bytes  # as sent, never decompressed; at most one read longer than the limit
    is_whole: bool  # False: it went on behind the limit


class HttpPool:
    """Posts from one event loop. It sets no limit to connections or time: callers do.

    Proxies and netrc of the environment are not used, cookies not kept, redirects not followed.
    """

    def __init__(self, connect_timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], limits: tuple[int, int]) -> Answer:
        """Return the answer; a request that is broken off, by its caller or the limit, takes its connection with it.

        limits: most bytes to read of an answer of status 200, and of any other.
        Raises: NoAnswer.
        """
        try:
            return await self._post(yarl.URL(url, encoded=True), body, headers, limits)
        except aiohttp.ConnectionTimeoutError:
            raise NoAnswer("no connection in time") from None
        except aiohttp.ClientConnectorError as error:
            raise NoAnswer(f"no connection ({error.os_error.strerror or error.os_error})") from error
        except aiohttp.ClientError as error:
            raise NoAnswer(f"{type(error).__name__} {error}".strip()) from error

    async def _post(self, url: yarl.URL, body: bytes, headers: Mapping[str, str], limits: tuple[int, int]) -> Answer:
        used = _Used()
        try:
            return await _answered(self._opened(), url, body, headers, limits, used)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            # A kept connection may have ended at the other side meanwhile: uvicorn hangs up behind an exception in a
            # user's function, and says nothing of it in its answer. Then the request was never looked at.
            if not used.is_kept_connection:
                raise
        async with _open_session(self._timeout, force_close=True) as fresh:
            return await _answered(fresh, url, body, headers, limits, _Used())

    async def close(self) -> None:
        """Close the kept connections."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = _open_session(self._timeout, force_close=False)
        return self._session


@dataclass
class _Used:
    """What a request was sent over."""

    is_kept_connection: bool = False  # True: one that an earlier request left open


async def _answered(
    session: aiohttp.ClientSession,
    url: yarl.URL,
    body: bytes,
    headers: Mapping[str, str],
    limits: tuple[int, int],
    used: _Used,
) -> Answer:
    async with session.post(
        url, data=io.BytesIO(body), headers=headers, allow_redirects=False, trace_request_ctx=used
    ) as response:
        limit, read = limits[response.status != 200], bytearray()
        # What counts is what was read: Content-Length may be absent, or not true.
        async for chunk in response.content.iter_any():
            read += chunk
            if len(read) > limit:
                break
        return Answer(response.status, response.headers, bytes(read), len(read) <= limit)


def _open_session(timeout: aiohttp.ClientTimeout, force_close: bool) -> aiohttp.ClientSession:
    """Return a session; force_close: each request has a connection of its own."""
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(_note_kept)
    keeping: dict[str, Any] = {} if force_close else {"keepalive_timeout": _KEEPALIVE_S}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=force_close, ssl=_trusted(), **keeping),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=timeout,
        auto_decompress=False,
        trace_configs=[tracing],
    )


async def _note_kept(session: aiohttp.ClientSession, context: SimpleNamespace, event: object) -> None:
    context.trace_request_ctx.is_kept_connection = True


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the certificates to trust; shared, since reading them takes tens of milliseconds."""
    return ssl.create_default_context(cafile=certifi.where())
