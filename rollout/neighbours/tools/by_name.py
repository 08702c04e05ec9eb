"""The tools by name; a new one is a class and a line here, and its name in protocol/settings/tools.py.

Beside them are those that the settings bring: tools.http, and tools.mcp, which are known once their servers answer.
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
    """Return these tools, ready to be checked.

    Raises: SettingsError for a name that is no tool's, OperatorError where there is no address for one.
    """
    outside = {tool.name: tool for tool in spec.tools.http}
    for name in names:
        # One that is not known yet may be an MCP server's.
        if name not in TOOLS and name not in outside and not spec.tools.mcp:
            raise no_such_tool(name, [*TOOLS, *outside], spec)
    known = [name for name in sorted(names) if name in TOOLS or name in outside]
    return {name: HttpToolClient(outside[name]) if name in outside else TOOLS[name](spec, node) for name in known}


def no_such_tool(name: str, there: Iterable[str], spec: RunSpec) -> SettingsError:
    """Return the error of a class that requires a tool which is not there."""
    return SettingsError(
        f"settings: rollout.environment = {spec.rollout.environment}: its class requires the tool {name!r}. "
        f"There are: {', '.join(there)}."
    )
