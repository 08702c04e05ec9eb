"""Makes the environment in which the policy calls tools, for each sample anew."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from protocol.settings.tools import ToolsSettings
from rollout.environments.base import ModelTool, Resources
from rollout.environments.tool_use.tool_use import ToolUse, chosen_format
from rollout.environments.tool_use.toolbox import SharedTools, Toolbox


@dataclass(frozen=True)
class MakeToolUse:
    """Stands where an environment's class does."""

    settings: ToolsSettings  # of the run
    make_toolbox: Callable[[Resources], Toolbox]  # the tools of one conversation
    requires: tuple[str, ...] = ()  # names of those that the settings name
    stop: tuple[str, ...] = ()
    offers_mcp: bool = False  # True: the tools of tools.mcp too

    def __call__(self, resources: Resources) -> ToolUse:
        settings = self.settings
        return ToolUse(resources, self.make_toolbox(resources), settings.call_format, settings.max_calls_per_turn)

    def check_model(self, chat_template: Any) -> None:
        """Raise SettingsError when a model with this chat template (None: it has none) cannot be told of tools."""
        chosen_format(self.settings.call_format, chat_template)


def make_tool_use(settings: ToolsSettings) -> MakeToolUse:
    """Return the environment `tools`: those of tools.names and tools.http in their order, then the MCP servers'."""
    names = (*settings.names, *(tool.name for tool in settings.http))

    def shared(resources: Resources) -> Toolbox:
        offered = [*names, *(name for name in resources.tools if name not in names)]
        return SharedTools([cast(ModelTool, resources.tool(name)) for name in offered])

    return MakeToolUse(settings, shared, names, offers_mcp=True)
