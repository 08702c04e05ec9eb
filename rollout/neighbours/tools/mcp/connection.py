"""One session with an MCP server, from its start to its end: the door to the library `mcp`.

The library's resources must be closed by the task that opened them. So each session has a task of its own.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from protocol.errors import NeighbourError
from protocol.one_line import one_line
from protocol.settings.tools import McpServer
from rollout.neighbours.http.pool import headers_from_environment, variables_from_environment

# Time that the library needs in addition to a server's own limits: for its version, and to end it.
_MARGIN_S = 15.0


class McpConnection:
    """A session. `client` is available from `open` until `is_over`."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._leave = asyncio.Event()
        self._is_open = asyncio.Event()
        self._client: Client | None = None
        self._problem = "it ended before it answered"
        self._life = asyncio.create_task(self._live(), name=f"mcp {server.name}")

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    @property
    def is_over(self) -> bool:
        """True once the server has ended or was ended."""
        return self._leave.is_set() or self._life.done()

    async def open(self) -> None:
        """Return once the server has answered. Raises: NeighbourError with the reason."""
        opened = asyncio.create_task(self._is_open.wait())
        try:
            limit_s = self._server.start_timeout_s + _MARGIN_S
            await asyncio.wait([opened, self._life], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
            if not self._is_open.is_set():
                self.leave()
        if not self._is_open.is_set():
            problem = self._problem if self._life.done() else f"no answer within {self._server.start_timeout_s:g} s"
            raise NeighbourError(f"mcp:{self._server.name}", problem)

    def leave(self) -> None:
        """End the session, and a server that was started as a command. Open calls fail."""
        self._leave.set()

    async def close(self) -> None:
        """End the session and wait. A server that does not end is killed within seconds."""
        self.leave()
        if not self._is_open.is_set():
            self._life.cancel()
        await asyncio.wait([self._life], timeout=_MARGIN_S)

    async def _live(self) -> None:
        try:
            transport = _transport_of(self._server)
            async with Client(transport, cache=None, read_timeout_seconds=self._server.start_timeout_s) as client:
                self._client = client
                self._is_open.set()
                await self._leave.wait()
        except Exception as error:  # errors of the library, the network or the server
            self._problem = _reason(error)
        finally:
            self._leave.set()


def _transport_of(server: McpServer) -> Any:
    if server.url is None:
        variables = {**server.env, **variables_from_environment(server.env_from, f"tools.mcp {server.name}")}
        command, *arguments = server.command
        # The server's errors go to this process's stderr. sys.stderr itself may be no file.
        return stdio_client(
            StdioServerParameters(command=command, args=arguments, env=variables, cwd=server.folder or os.getcwd()),
            errlog=sys.__stderr__ or sys.stderr,
        )
    return _over_http(server)


@asynccontextmanager
async def _over_http(server: McpServer) -> AsyncIterator[Any]:
    headers = headers_from_environment(server.headers_env, f"tools.mcp {server.name}")
    timeout = httpx2.Timeout(10.0, read=server.timeout_s + _MARGIN_S)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=False) as client,
        streamable_http_client(str(server.url), http_client=client) as streams,
    ):
        yield streams


def _reason(error: BaseException) -> str:
    """Return the first error in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {one_line(error)}"
