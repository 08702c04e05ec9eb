"""One tool object of verl's form, called in the forms that its releases have had.

create(instance_id, ..)               -> instance_id, or (instance_id, ToolResponse)
execute(instance_id, parameters, ..)  -> (text or ToolResponse, reward, metrics); parameters: JSON text in old ones
calc_reward(instance_id, ..)          -> reward
release(instance_id, ..)
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from protocol.errors import NeighbourError
from rollout.environments.tool_use.toolbox import Answered

_ENVIRONMENT = "environment"


class VerlTool:
    """A tool of the run; every method names the conversation by its instance id."""

    def __init__(self, tool: Any, schema: dict[str, Any]) -> None:
        """tool: the user's object. schema: what the policy is told of it."""
        self.schema = schema
        self._tool = tool
        self._takes_text = _is_text(tool.execute)

    async def create(self, instance_id: str, options: Mapping[str, Any]) -> str:
        """Return the id under which the tool knows the conversation. options: the row's create_kwargs."""
        given = {"create_kwargs": dict(options), **options}
        created = await self._tool.create(instance_id, **_accepted(self._tool.create, given))
        return str(created[0] if isinstance(created, tuple | list) else created)

    async def execute(self, instance_id: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Answered:
        """Return what a call gave. Raises: NeighbourError for a reply that is no text."""
        parameters = json.dumps(arguments) if self._takes_text else dict(arguments)
        accepted = _accepted(self._tool.execute, options)
        returned = await self._tool.execute(instance_id, parameters, **accepted)
        response, reward, *_ = returned if isinstance(returned, tuple | list) else (returned, None)
        return Answered(_text(response), reward)

    async def calc_reward(self, instance_id: str, options: Mapping[str, Any]) -> Any:
        """Return the reward of all that the conversation has done with the tool."""
        return await self._tool.calc_reward(instance_id, **_accepted(self._tool.calc_reward, options))

    async def release(self, instance_id: str, options: Mapping[str, Any]) -> None:
        """Have the tool forget the conversation."""
        await self._tool.release(instance_id, **_accepted(self._tool.release, options))


def _accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those keywords that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def _is_text(execute: Callable[..., Any]) -> bool:
    wanted = inspect.signature(execute).parameters.get("parameters")
    return wanted is not None and wanted.annotation in (str, "str")


def _text(response: Any) -> str:
    if isinstance(response, str):
        return response
    read = response if isinstance(response, Mapping) else getattr(response, "__dict__", {})
    if read.get("image") or read.get("video"):
        raise NeighbourError(_ENVIRONMENT, "a tool answered with pictures, and the policy reads text alone")
    text = read.get("text")
    if text is not None and not isinstance(text, str):
        raise NeighbourError(_ENVIRONMENT, f"a tool's text is {type(text).__name__}, expected a text")
    return text or ""
