"""What a tool is. It lives as long as its run is attached; its limits (deadlines, calls at a time) are its own."""

from collections.abc import Mapping
from typing import Any, Protocol


class Tool(Protocol):
    """Called by environments as a function of its own form, by the policy through `schema` and `answer`.

    A call that fails raises NeighbourError with the tool's boundary.
    """

    @property
    def schema(self) -> dict[str, Any]:
        """What the policy is told of it: OpenAI's form, with name, description and parameters."""

    @property
    def is_accepting(self) -> bool:
        """False while calls would only wait: no new leases are asked for."""

    async def __call__(self, *args: Any, **arguments: Any) -> Any: ...

    async def answer(self, arguments: Mapping[str, Any]) -> str:
        """Return what the policy reads. Raises: ToolRefusal when the policy got the call wrong."""

    async def check(self) -> None:
        """Use it once, without retries. Raises: NeighbourError saying what to change."""

    async def close(self) -> None: ...


def function_schema(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Return the schema of a tool whose parameters are texts that it needs; their descriptions by name."""
    properties = {parameter: {"type": "string", "description": text} for parameter, text in parameters.items()}
    form = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": form}}
