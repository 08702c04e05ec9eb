"""The tools of a run's MCP servers: listed when the run attaches, kept as they were then."""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mcp_types import Tool as ListedTool

from protocol.errors import NeighbourError
from protocol.settings.tools import McpServer
from rollout.neighbours.tools.mcp.server import McpClient
from rollout.neighbours.tools.tool import Tool


class McpTool:
    """One tool of a server."""

    def __init__(self, name: str, listed: ListedTool, client: McpClient) -> None:
        """name: by which the policy calls it."""
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
        return await self._client.call(self._name, arguments)

    async def check(self) -> None:
        """It was listed, and so is there."""

    async def close(self) -> None:
        """Its server is closed by `McpTools`."""


class McpTools:
    """All servers' tools."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        self._clients = [McpClient(server) for server in servers]

    async def listed(self, taken: Collection[str]) -> dict[str, Tool]:
        """Return the tools by name; one whose name is another's too is called server.tool. Starts the servers.

        taken: names that are others' already. Raises: NeighbourError saying what to change.
        """
        lists = await asyncio.gather(*(self._of(client) for client in self._clients))
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

    async def _of(self, client: McpClient) -> list[ListedTool]:
        server = client.server
        try:
            tools = await client.listed()
        except NeighbourError as error:
            advice = f"Start it, or change tools.mcp (name {server.name})."
            raise NeighbourError(error.boundary, f"{error.detail}. {advice}") from error
        if server.tools is None:
            return tools
        by_name = {tool.name: tool for tool in tools}
        if missing := [name for name in server.tools if name not in by_name]:
            there = f"It has {', '.join(by_name) or 'none'}."
            raise NeighbourError(f"mcp:{server.name}", f"it has no tool {missing[0]!r}. {there} Change its `tools`.")
        return [by_name[name] for name in server.tools]
