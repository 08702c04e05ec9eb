"""verl's tools in one conversation, called in the forms of all its releases.

create(instance_id, ..)               -> instance_id, or (instance_id, ToolResponse)
execute(instance_id, parameters, ..)  -> (text or ToolResponse, reward, metrics); parameters: JSON text in old releases
calc_reward(instance_id, ..)          -> reward
release(instance_id, ..)
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

from protocol.errors import NeighbourError
from rollout.environments.base import Task
from rollout.environments.timed_calls import timed_call
from rollout.environments.tool_use.arguments import parse_texts
from rollout.environments.tool_use.tool_use import ToolReply

_ENVIRONMENT = "environment"


class VerlTool:
    """One tool of the run. Every method names the conversation by its instance id."""

    def __init__(self, tool: Any, schema: dict[str, Any]) -> None:
        """tool: the user's object. schema: the tool's description for the policy."""
        self.schema = schema
        self._tool = tool
        wanted = inspect.signature(tool.execute).parameters.get("parameters")
        self._takes_text = wanted is not None and wanted.annotation in (str, "str")

    async def create(self, instance_id: str, options: Mapping[str, Any]) -> str:
        """Return the tool's id of the conversation. options: the row's create_kwargs."""
        given = {"create_kwargs": dict(options), **options}
        created = await self._tool.create(instance_id, **_accepted_options(self._tool.create, given))
        return str(created[0] if isinstance(created, tuple | list) else created)

    async def execute(self, instance_id: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> ToolReply:
        """Return a call's reply. Raises: NeighbourError for a reply that is not text."""
        parameters = json.dumps(arguments) if self._takes_text else dict(arguments)
        accepted = _accepted_options(self._tool.execute, options)
        returned = await self._tool.execute(instance_id, parameters, **accepted)
        response, reward, *_ = returned if isinstance(returned, tuple | list) else (returned, None)
        return ToolReply(_text(response), reward)

    async def calc_reward(self, instance_id: str, options: Mapping[str, Any]) -> Any:
        """Return the tool's reward for the whole conversation."""
        return await self._tool.calc_reward(instance_id, **_accepted_options(self._tool.calc_reward, options))

    async def release(self, instance_id: str, options: Mapping[str, Any]) -> None:
        """End the conversation in the tool."""
        await self._tool.release(instance_id, **_accepted_options(self._tool.release, options))


class VerlToolbox:
    """The tools of one conversation: each is created at its first call and released at the end.

    reward is tools.reward:
    none    the tools' rewards are not used
    steps   the reward of each `execute` is added to the conversation's reward
    final   the reward of `calc_reward` after the last call is the tool's reward; each call adds the change
    """

    has_state = True

    def __init__(self, tools: Mapping[str, VerlTool], reward: Literal["none", "steps", "final"]) -> None:
        self._tools, self._offered = tools, tools
        self._reward = reward
        self._ids: dict[str, str] = {}
        self._rewards: dict[str, float] = {}
        self._options: Mapping[str, Any] = {}

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        return [tool.schema for tool in self._offered.values()]

    async def begin(self, task: Task) -> None:
        """Read the row's options of tools: `tools_kwargs` in its column `extra_info`, or in a column of its own.

        `tool_selection` in `extra_info` names the tools that the row offers; as in verl, unknown names are ignored.
        """
        extra = task.columns.get("extra_info")
        if isinstance(extra, Mapping) and (selected := extra.get("tool_selection")):
            self._offered = {name: self._tools[name] for name in selected if name in self._tools}
        row = extra if isinstance(extra, Mapping) and "tools_kwargs" in extra else task.columns
        options = row.get("tools_kwargs")
        self._options = options if isinstance(options, Mapping) else {}

    async def answer(self, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        tool = self._offered[name]
        arguments = parse_texts(arguments, tool.schema)
        if name not in self._ids:
            self._ids[name] = await tool.create(str(uuid4()), self._options_of(name, "create_kwargs"))
        with timed_call("tool", name):
            reply = await tool.execute(self._ids[name], arguments, self._options_of(name, "execute_kwargs"))
        if self._reward == "steps":
            return reply
        return ToolReply(reply.text, await self._reward_change(name) if self._reward == "final" else None)

    async def close(self) -> None:
        # Each for itself: a release that raises or hangs must not keep what the other tools hold.
        releases = (
            self._tools[name].release(one, self._options_of(name, "release_kwargs")) for name, one in self._ids.items()
        )
        for outcome in await asyncio.gather(*releases, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _reward_change(self, name: str) -> float:
        options = self._options_of(name, "calc_reward_kwargs")
        reward = float(await self._tools[name].calc_reward(self._ids[name], options))
        change = reward - self._rewards.get(name, 0.0)
        self._rewards[name] = reward
        return change

    def _options_of(self, name: str, method: str) -> Mapping[str, Any]:
        """Return the row's options for one method of a tool."""
        options = self._options.get(name)
        given = options.get(method) if isinstance(options, Mapping) else None
        return given if isinstance(given, Mapping) else {}


def _accepted_options(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that a function accepts."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def _text(response: Any) -> str:
    if isinstance(response, str):
        return response
    fields = response if isinstance(response, Mapping) else getattr(response, "__dict__", {})
    if not (fields.keys() & {"text", "image", "video"}):
        problem = f"a tool answered with {response!r:.80}, expected a text or a ToolResponse"
        raise NeighbourError(_ENVIRONMENT, problem)
    if fields.get("image") or fields.get("video"):
        raise NeighbourError(_ENVIRONMENT, "a tool answered with pictures, and the policy reads text alone")
    text = fields.get("text")
    if text is not None and not isinstance(text, str):
        raise NeighbourError(_ENVIRONMENT, f"a tool's text is {type(text).__name__}, expected a text")
    return text or ""
