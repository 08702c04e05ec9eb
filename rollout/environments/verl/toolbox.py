"""The verl tools of one conversation: each is created at its first call and released at the end."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

from rollout.environments.base import Task, ToolRefusal
from rollout.environments.tool_use.toolbox import Answered
from rollout.environments.verl.tool import VerlTool


class VerlToolbox:
    """reward, as tools.reward has it:

    none    the tools' rewards are not used
    steps   what `execute` gives is added to the conversation's reward, call by call
    final   what `calc_reward` gives after the last call is; each call adds how much it changed, so that a conversation
            that ends anywhere has it
    """

    has_state = True

    def __init__(self, tools: Mapping[str, VerlTool], reward: Literal["none", "steps", "final"]) -> None:
        self._tools = tools
        self._reward = reward
        self._ids: dict[str, str] = {}
        self._so_far: dict[str, float] = {}
        self._options: Mapping[str, Any] = {}

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def begin(self, task: Task) -> None:
        """Take what the row says of tools: the `tools_kwargs` of its column `extra_info`, or of its own."""
        extra = task.columns.get("extra_info")
        row = extra if isinstance(extra, Mapping) and "tools_kwargs" in extra else task.columns
        options = row.get("tools_kwargs")
        self._options = options if isinstance(options, Mapping) else {}

    async def answer(self, name: str, arguments: Mapping[str, Any]) -> Answered:
        if name not in self._tools:
            raise ToolRefusal(f"there is no tool {name}")
        tool = self._tools[name]
        if name not in self._ids:
            self._ids[name] = await tool.create(str(uuid4()), self._of(name, "create_kwargs"))
        answered = await tool.execute(self._ids[name], arguments, self._of(name, "execute_kwargs"))
        if self._reward == "steps":
            return answered
        return Answered(answered.text, await self._change(name) if self._reward == "final" else None)

    async def close(self) -> None:
        for name, instance_id in self._ids.items():
            await self._tools[name].release(instance_id, self._of(name, "release_kwargs"))

    async def _change(self, name: str) -> float:
        reward = float(await self._tools[name].calc_reward(self._ids[name], self._of(name, "calc_reward_kwargs")))
        change = reward - self._so_far.get(name, 0.0)
        self._so_far[name] = reward
        return change

    def _of(self, name: str, what: str) -> Mapping[str, Any]:
        """Return what the row gives a tool for one of its methods."""
        options = self._options.get(name)
        given = options.get(what) if isinstance(options, Mapping) else None
        return given if isinstance(given, Mapping) else {}
