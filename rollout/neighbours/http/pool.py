"""POST requests over kept connections, with limits on the size of a reply.

aiohttp costs a fraction of httpx's time per request. A rollout server makes several requests per trajectory in the
process that feeds its engine.
"""

import functools
import io
import os
import ssl
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
import certifi
import yarl

from protocol.errors import OperatorError

# Below uvicorn's default of 5 s: the server must not close a connection that is about to be reused.
_KEEPALIVE_S = 4.0


class ClosedAtExit(AbstractAsyncContextManager[Any]):
    """Base of clients: `async with` closes them."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class NoAnswer(Exception):
    """No complete answer: no connection, or a broken one."""


@dataclass(frozen=True)
class Answer:
    """The answer of a service."""

    status: int
    headers: Mapping[str, str]  # case-insensitive names
    body: bytes  # bytes as sent, never decompressed; at most one read beyond the limit
    is_whole: bool  # False: cut at the limit


class HttpPool:
    """Posts from one event loop. Callers limit connections and time.

    It ignores proxies, netrc and cookies, and does not follow redirects.
    """

    def __init__(self, connect_timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], limits: tuple[int, int]) -> Answer:
        """Return the answer. An interrupted request closes its connection.

        limits: most bytes to read of an answer with status 200, and of any other.
        Raises: NoAnswer.
        """
        try:
            async with self._open().post(
                yarl.URL(url, encoded=True), data=io.BytesIO(body), headers=headers, allow_redirects=False
            ) as response:
                limit, read = limits[response.status != 200], bytearray()
                # Count the bytes read: Content-Length may be absent or wrong.
                async for chunk in response.content.iter_any():
                    read += chunk
                    if len(read) > limit:
                        break
                return Answer(response.status, response.headers, bytes(read), len(read) <= limit)
        except aiohttp.ConnectionTimeoutError:
            raise NoAnswer("no connection in time") from None
        except aiohttp.ClientConnectorError as error:
            raise NoAnswer(f"no connection ({error.os_error.strerror or error.os_error})") from error
        except aiohttp.ClientError as error:
            raise NoAnswer(f"{type(error).__name__} {error}".strip()) from error

    async def close(self) -> None:
        """Close the kept connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=_trusted_certificates(), keepalive_timeout=_KEEPALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                auto_decompress=False,
            )
        return self._session


@functools.cache
def _trusted_certificates() -> ssl.SSLContext:
    """Return the trusted certificates; shared, because reading them takes tens of milliseconds."""
    return ssl.create_default_context(cafile=certifi.where())


def headers_from_environment(headers_env: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return secret headers, with lower-case names.

    headers_env: header -> environment variable. setting: setting that names them, for the error.
    Raises: OperatorError for a variable that is not set.
    """
    return {name.lower(): value for name, value in _values(headers_env, f"{setting}: the header").items()}


def variables_from_environment(env_from: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return secret variables for a child process. Raises: OperatorError for a variable that is not set."""
    return _values(env_from, f"{setting}: the variable")


def _values(variables: Mapping[str, str], setting: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, variable in variables.items():
        value = os.environ.get(variable)
        if not value:
            raise OperatorError(
                f"settings: {setting} {name} comes from the environment variable {variable}, which is not set. "
                "Export it before you start the cluster."
            )
        values[name] = value
    return values
