"""The bundled tools by name. A new one is a class, a line here, and its name in protocol/settings/tools.py.

The settings add tools.http, and tools.mcp once their servers answer.
"""

from collections.abc import Callable, Collection, Iterable

from protocol.errors import SettingsError
from protocol.settings.run_spec import RunSpec
from rollout.neighbours.node import Node
from rollout.neighbours.tools.calculator import Calculator
from rollout.neighbours.tools.http_tool import HttpToolClient
from rollout.neighbours.tools.python import PythonTool
from rollout.neighbours.tools.search import SearchTool
from rollout.neighbours.tools.tool import Tool

TOOLS: dict[str, Callable[[RunSpec, Node], Tool]] = {
    "calculator": Calculator,
    "python": PythonTool,
    "search": SearchTool,
}


def open_tools(names: Collection[str], spec: RunSpec, node: Node) -> dict[str, Tool]:
    """Return the tools of these names by name; no service is called yet.

    With servers in tools.mcp, an unknown name is left out: it may be one of their tools, which are known later.

    Raises: SettingsError for an unknown name, OperatorError for a tool without an address.
    """
    http_tools = {tool.name: tool for tool in spec.tools.http}
    for name in names:
        # An unknown name may be a tool of an MCP server.
        if name not in TOOLS and name not in http_tools and not spec.tools.mcp:
            raise no_such_tool(name, [*TOOLS, *http_tools], spec)
    known = [name for name in sorted(names) if name in TOOLS or name in http_tools]
    return {name: HttpToolClient(http_tools[name]) if name in http_tools else TOOLS[name](spec, node) for name in known}


def no_such_tool(name: str, available: Iterable[str], spec: RunSpec) -> SettingsError:
    """Return the error of an environment that requires an unknown tool. available: names of the known ones."""
    return SettingsError(
        f"settings: rollout.environment = {spec.rollout.environment}: its class requires the tool {name!r}. "
        f"There are: {', '.join(available)}."
    )
