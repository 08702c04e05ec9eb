"""The interface of tools. A tool lives while its run is attached, and has its own deadlines and concurrency limit."""

from typing import Any, Protocol

from rollout.environments.base import ModelTool


class Tool(ModelTool, Protocol):
    """A tool: environments call it as a function, the policy through `schema` and `answer`.

    A failed call raises NeighbourError with the tool's boundary. A tool without a service has the methods below.
    """

    async def __call__(self, *args: Any, **arguments: Any) -> Any: ...

    @property
    def is_accepting(self) -> bool:
        """False while calls would only wait. Then no leases are requested."""
        return True

    async def check(self) -> None:
        """Use the tool once, without retries. Raises: NeighbourError with the remedy."""
        return None

    async def close(self) -> None:
        """Release what the tool holds."""
        return None


def function_schema(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Return the schema of a tool with required text parameters. parameters: their descriptions by name."""
    properties = {parameter: {"type": "string", "description": text} for parameter, text in parameters.items()}
    form = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": form}}
