"""MCP servers and their tools: one session per server for all samples, restarted after its end.

A call that fails, hangs or loses its server affects no other call. It is not retried: the tool may have done its work.
After a call that hung, a server that answers no request at all is restarted.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
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
from rollout.environments.timed_calls import timed_call
from rollout.environments.tool_use.arguments import check_json
from rollout.neighbours.http.circuit_breaker import CircuitBreaker
from rollout.neighbours.tools.mcp.connection import McpConnection
from rollout.neighbours.tools.tool import Tool

_T = TypeVar("_T")
# The library counts a call's limit from its sending, which a server may block.
_UNSENT_S = 5.0
_MAX_PAGES = 100


class McpClient:
    """One server's session, in one event loop."""

    def __init__(self, server: McpServer, check_s: float = 10.0) -> None:
        """check_s: limit for a live server to list its tools."""
        self.server = server
        self._check_s = check_s
        self._boundary = f"mcp:{server.name}"
        self._slots = asyncio.Semaphore(server.max_concurrency)
        self._starts = CircuitBreaker(threshold=1, max_cooldown_s=30.0, after_s=0.0, name=f"MCP server {server.name}")
        self._starting = asyncio.Lock()
        self._connection: McpConnection | None = None
        self._closing: set[asyncio.Task[None]] = set()  # closing sessions
        self._offered: dict[str, Any] = {}  # schema of the arguments of each tool that the run's prompts describe

    @property
    def is_accepting(self) -> bool:
        """False while the server cannot be started."""
        return not self._starts.is_open

    async def list_tools(self) -> list[ListedTool]:
        """Return the server's tools. Raises: NeighbourError."""
        return await self._list_tools(await self._ensure_started())

    def offer(self, tools: Sequence[ListedTool]) -> None:
        """Expect these tools of the server also after its next start."""
        self._offered = {tool.name: tool.input_schema for tool in tools}

    async def _list_tools(self, connection: McpConnection) -> list[ListedTool]:
        tools: list[ListedTool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            try:
                asked = connection.client.list_tools(cursor=cursor)
                page = await self._within(self.server.timeout_s, connection, asked)
            except ToolRefusal as error:
                raise NeighbourError(self._boundary, f"it refuses to list its tools: {error}") from None
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise NeighbourError(self._boundary, f"it has more tools than {_MAX_PAGES} pages, {len(tools)} on these")

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the text that the policy reads. Raises: ToolRefusal, NeighbourError."""
        check_json(arguments)  # arguments that the library cannot send would end the session of all samples
        async with self._slots:
            connection = await self._ensure_started()
            try:
                return await self._call(connection, tool, arguments)
            except ToolRefusal:
                await self._check_offered(connection)  # the server may refuse a tool that it has lost
                raise

    async def close(self) -> None:
        """End the session, and a server that was started as a command."""
        self._close_later(self._connection)
        await asyncio.gather(*self._closing)

    async def _call(self, connection: McpConnection, tool: str, arguments: Mapping[str, Any]) -> str:
        limit_s = self.server.timeout_s
        calling = connection.client.call_tool(tool, dict(arguments), read_timeout_seconds=limit_s)
        result = await self._within(limit_s + _UNSENT_S, connection, calling)
        text = text_of(result)
        if result.is_error and self.server.tool_errors == "fail":
            raise NeighbourError(self._boundary, f"{tool}: {one_line(text)}")
        if result.is_error:
            raise ToolRefusal(text)
        return text

    async def _ensure_started(self) -> McpConnection:
        """Return a live session. After a failed start, wait for the circuit breaker."""
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
        self._close_later(self._connection)
        self._connection = None
        async with self._starts.attempt():
            connection = McpConnection(self.server)
            try:
                await connection.open()
                await self._check_offered(connection)
            except BaseException:
                self._close_later(connection)
                raise
            self._connection = connection

    async def _check_offered(self, connection: McpConnection) -> None:
        """Raise NeighbourError, and end the session, if the server has lost an offered tool.

        The policy would read that as the result of its call.
        """
        found = {tool.name: tool.input_schema for tool in await self._list_tools(connection)} if self._offered else {}
        for name, schema in self._offered.items():
            if found.get(name) != schema:
                connection.leave()
                change = "has other arguments" if name in found else "is gone"
                problem = f"its tool {name!r} {change} since the run began. Start the server as it was, or another run"
                raise NeighbourError(self._boundary, problem)

    async def _within(self, limit_s: float, connection: McpConnection, asked: Awaitable[_T]) -> _T:
        """Return the server's answer. Raises: ToolRefusal for wrong arguments, NeighbourError otherwise."""
        try:
            async with asyncio.timeout(limit_s):
                return await asked
        except TimeoutError:
            await self._check_alive(connection)
            raise NeighbourError(self._boundary, f"no answer within {limit_s:g} s") from None
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolRefusal(error.message) from None
            if error.code == CONNECTION_CLOSED:
                connection.leave()
            await self._check_alive(connection)  # behind a URL it may have forgotten the session
            raise NeighbourError(self._boundary, one_line(error.message)) from error
        except Exception as error:  # errors of the library, of the network, of one result, such as its structure
            await self._check_alive(connection)
            raise NeighbourError(self._boundary, describe_error(error)) from error

    async def _check_alive(self, connection: McpConnection) -> None:
        """Check that a server still answers after a call that failed. Otherwise end the session."""
        if connection.is_over:
            return
        try:
            async with asyncio.timeout(self._check_s):
                await connection.client.list_tools()
        except Exception:
            connection.leave()

    def _close_later(self, connection: McpConnection | None) -> None:
        """Close a session without waiting."""
        if connection is None:
            return
        closing = asyncio.create_task(connection.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def text_of(result: CallToolResult) -> str:
    """Return a result's texts, a line each; without any, its structured content as JSON.

    Other parts become a line that names their type.
    Raises: ToolRefusal for a result of other parts alone, unless it is an error.
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
    if not has_text and result.content and not result.is_error:
        raise ToolRefusal(f"the reply holds no text but {result.content[0].type}, which cannot be read here")
    return "\n".join(lines)


class McpTool(Tool):
    """One tool of a server. Listing it was its check, and `McpTools` closes the server."""

    def __init__(self, name: str, listed: ListedTool, client: McpClient) -> None:
        """name: the tool's name for the policy."""
        self._client = client
        self._name = listed.name
        function = {"name": name, "description": listed.description or "", "parameters": listed.input_schema}
        self.schema: dict[str, Any] = {"type": "function", "function": function}

    @property
    def is_accepting(self) -> bool:
        return self._client.is_accepting

    async def __call__(self, *args: Any, **arguments: Any) -> str:
        return await self.answer(arguments)

    async def answer(self, arguments: Mapping[str, Any]) -> str:
        with timed_call("tool", self._name):
            return await self._client.call(self._name, arguments)


class McpTools:
    """All servers' tools."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        self._clients = [McpClient(server) for server in servers]

    async def list_tools(self, taken: Collection[str]) -> dict[str, Tool]:
        """Return the tools by name. A name that is not unique becomes server.tool. Starts the servers.

        taken: names of other tools. Raises: NeighbourError with the remedy.
        """
        lists = await self._all_lists()
        count = Counter([*taken, *(tool.name for tools in lists for tool in tools)])
        offered: dict[str, Tool] = {}
        for client, tools in zip(self._clients, lists, strict=True):
            for tool in tools:
                name = tool.name if count[tool.name] == 1 else f"{client.server.name}.{tool.name}"
                if name in offered or name in taken:
                    problem = f"its tool {tool.name!r} would be called {name!r}, as another is. Change its `tools`."
                    raise NeighbourError(f"mcp:{client.server.name}", problem)
                offered[name] = McpTool(name, tool, client)
        return offered

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _all_lists(self) -> list[list[ListedTool]]:
        """Return each server's tools. Raises: NeighbourError of the first that fails; then no other still starts."""
        listing = [asyncio.create_task(self._of(client)) for client in self._clients]
        try:
            return await asyncio.gather(*listing)
        except BaseException:
            # A start that outlived `close` would leave its server's process without an owner.
            for task in listing:
                task.cancel()
            await asyncio.gather(*listing, return_exceptions=True)
            raise

    async def _of(self, client: McpClient) -> list[ListedTool]:
        server = client.server
        try:
            tools = await client.list_tools()
        except NeighbourError as error:
            advice = f"Start it, or change tools.mcp (name {server.name})."
            if server.url is not None:
                advice += " A url has to speak streamable HTTP; SSE alone is not enough."
            raise NeighbourError(error.boundary, f"{error.detail}. {advice}") from error
        if server.tools is None:
            client.offer(tools)
            return tools
        by_name = {tool.name: tool for tool in tools}
        if missing := [name for name in server.tools if name not in by_name]:
            there = f"It has {', '.join(by_name) or 'none'}."
            raise NeighbourError(f"mcp:{server.name}", f"it has no tool {missing[0]!r}. {there} Change its `tools`.")
        chosen = [by_name[name] for name in server.tools]
        client.offer(chosen)
        return chosen
