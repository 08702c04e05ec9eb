"""One MCP server as this process uses it: one session for all samples, begun again when it has ended.

A call that fails, hangs or meets the server's end costs itself alone. It is not made again: the tool may have done its
work. A server that answers nothing at all any more after a call hung is ended and started again.
"""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    REQUEST_TIMEOUT,
    CallToolResult,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from mcp_types import Tool as ListedTool

from protocol.errors import NeighbourError
from protocol.one_line import describe_error, one_line
from protocol.settings.tools import McpServer
from rollout.environments.base import ToolRefusal
from rollout.environments.tool_use.arguments import check_json
from rollout.neighbours.http.circuit_breaker import CircuitBreaker
from rollout.neighbours.tools.mcp.connection import McpConnection

_T = TypeVar("_T")
# The library counts a call's limit from when the call was sent; a server may not even take it.
_UNSENT_S = 5.0
_MAX_PAGES = 100


class McpClient:
    """Lives in one event loop."""

    def __init__(self, server: McpServer, look_s: float = 10.0) -> None:
        """look_s: within this a server that lives tells what tools it has, whatever else it does."""
        self.server = server
        self._look_s = look_s
        self._boundary = f"mcp:{server.name}"
        self._slots = asyncio.Semaphore(server.max_concurrency)
        self._starts = CircuitBreaker(threshold=1, max_cooldown_s=30.0, after_s=0.0, name=f"MCP server {server.name}")
        self._starting = asyncio.Lock()
        self._connection: McpConnection | None = None
        self._closing: set[asyncio.Task[None]] = set()  # sessions that were given up, on their way out
        self._looks: dict[McpConnection, asyncio.Task[None]] = {}

    @property
    def is_accepting(self) -> bool:
        """False while it cannot be started."""
        return not self._starts.is_open

    async def listed(self) -> list[ListedTool]:
        """Return the tools that it has. Raises: NeighbourError when it cannot be started or does not say them all."""
        connection = await self._started()
        tools: list[ListedTool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await self._within(self.server.timeout_s, connection, connection.client.list_tools(cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise NeighbourError(self._boundary, f"it has more tools than {_MAX_PAGES} pages, {len(tools)} on these")

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return what the policy reads. Raises: ToolRefusal for an error that is told to it, else NeighbourError."""
        check_json(arguments)  # what the library cannot send ends the session of all samples
        async with self._slots:
            connection = await self._started()
            limit_s = self.server.timeout_s
            calling = connection.client.call_tool(tool, dict(arguments), read_timeout_seconds=limit_s)
            result = await self._within(limit_s + _UNSENT_S, connection, calling)
        text = text_of(result)
        if result.is_error and self.server.tool_errors == "fail":
            raise NeighbourError(self._boundary, f"{tool}: {one_line(text)}")
        if result.is_error:
            raise ToolRefusal(text)
        return text

    async def close(self) -> None:
        """End the session, and the server where it is a command."""
        for look in tuple(self._looks.values()):
            look.cancel()
        self._give_up(self._connection)
        await asyncio.gather(*self._closing)

    async def _started(self) -> McpConnection:
        """Return a session that lives. A server that has just failed to start is waited for, behind its breaker."""
        limit_s = self.server.start_timeout_s + self.server.timeout_s
        try:
            async with asyncio.timeout(limit_s), self._starting:
                if self._connection is None or self._connection.is_over:
                    await self._start()
        except TimeoutError:
            raise NeighbourError(self._boundary, f"it could not be started within {limit_s:g} s") from None
        assert self._connection is not None
        return self._connection

    async def _start(self) -> None:
        self._give_up(self._connection)
        self._connection = None
        async with self._starts.attempt():
            connection = McpConnection(self.server)
            try:
                await connection.open()
            except BaseException:
                self._give_up(connection)
                raise
            self._connection = connection

    async def _within(self, limit_s: float, connection: McpConnection, asked: Awaitable[_T]) -> _T:
        """Return what the server answers. Raises: ToolRefusal for wrong arguments, NeighbourError otherwise."""
        try:
            async with asyncio.timeout(limit_s):
                return await asked
        except TimeoutError:
            self._look_at(connection)
            raise NeighbourError(self._boundary, f"no answer within {limit_s:g} s") from None
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolRefusal(error.message) from None
            if error.code == REQUEST_TIMEOUT:
                self._look_at(connection)
            elif error.code == CONNECTION_CLOSED:
                connection.leave()
            raise NeighbourError(self._boundary, one_line(error.message)) from error
        except Exception as error:  # of the library, of the network, of what the server sent
            connection.leave()
            raise NeighbourError(self._boundary, describe_error(error)) from error

    def _look_at(self, connection: McpConnection) -> None:
        """See, beside all calls, whether a server that let one hang still answers; end the session if it does not."""
        if connection in self._looks or connection.is_over:
            return

        async def look() -> None:
            try:
                async with asyncio.timeout(self._look_s):
                    await connection.client.list_tools()
            except Exception:
                connection.leave()

        def is_done(task: "asyncio.Task[None]") -> None:
            del self._looks[connection]

        self._looks[connection] = asyncio.create_task(look())
        self._looks[connection].add_done_callback(is_done)

    def _give_up(self, connection: McpConnection | None) -> None:
        """End a session without waiting for it."""
        if connection is None:
            return
        closing = asyncio.create_task(connection.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def text_of(result: CallToolResult) -> str:
    """Return a result as text: its texts, a line each; without any, its structured content as JSON.

    Of a part that is no text a line says that it was there. Raises: ToolRefusal for a result of such parts alone.
    """
    lines: list[str] = []
    has_text = False
    for part in result.content:
        if isinstance(part, TextContent):
            text: str | None = part.text
        elif isinstance(part, EmbeddedResource) and isinstance(part.resource, TextResourceContents):
            text = part.resource.text
        else:
            text = f"{part.name}: {part.uri}" if isinstance(part, ResourceLink) else None
        has_text = has_text or text is not None
        lines.append(text if text is not None else f"[{part.type}: cannot be read here]")
    if not has_text and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    if not has_text and result.content:
        raise ToolRefusal(f"the reply is no text but {result.content[0].type}, which cannot be read here")
    return "\n".join(lines)
