"""What one conversation's calls are answered by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.environments.base import ModelTool, Task, ToolRefusal


@dataclass(frozen=True)
class Answered:
    """What a call gave."""

    text: str  # what the policy reads
    reward: float | None = None  # that the tool gives for the call; None: it gives none


class Toolbox(Protocol):
    """The tools of one conversation."""

    has_state: bool  # True: they keep in this process what the conversation did with them

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """One per tool, in the order in which the policy is told of them."""

    async def begin(self, task: Task) -> None:
        """Make them ready for a conversation."""

    async def answer(self, name: str, arguments: Mapping[str, Any]) -> Answered:
        """Call the tool of this name. Raises: ToolRefusal when the policy got the call wrong."""

    async def close(self) -> None:
        """Give back what was made ready. Called once, also when `begin` failed."""


class SharedTools:
    """Tools that keep nothing of a conversation: one of each serves all of them."""

    has_state = False

    def __init__(self, tools: Sequence[ModelTool]) -> None:
        self._tools = {tool.schema["function"]["name"]: tool for tool in tools}

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def begin(self, task: Task) -> None:
        pass

    async def answer(self, name: str, arguments: Mapping[str, Any]) -> Answered:
        if name not in self._tools:
            raise ToolRefusal(f"there is no tool {name}")
        return Answered(await self._tools[name].answer(arguments))

    async def close(self) -> None:
        pass
