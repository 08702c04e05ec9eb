"""The names that agent files import from OpenRLHF, for machines without it.

An agent file needs them as base classes alone: who plays its conversation is Sluice.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any


class AgentInstanceBase:
    """One conversation's environment."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("AgentInstance has no step")


class AgentExecutorBase:
    """Whatever a file's executor is made from: it is never asked to run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("Sluice plays the conversation itself")


_NAMES = {
    "AgentInstanceBase": AgentInstanceBase,
    "AgentExecutorBase": AgentExecutorBase,
    "MultiTurnAgentExecutor": AgentExecutorBase,
    "SingleTurnAgentExecutor": AgentExecutorBase,
}
_MODULES = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")


def offer_base_classes() -> None:
    """Make `from openrlhf.utils.agent import ..` work in this process, unless OpenRLHF is installed."""
    if _MODULES[0] in sys.modules or importlib.util.find_spec(_MODULES[0]) is not None:
        return
    for name in _MODULES:
        module = ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
    for name, value in _NAMES.items():
        setattr(sys.modules[_MODULES[-1]], name, value)
