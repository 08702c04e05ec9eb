"""Loads OpenRLHF agent files: a function `step`, or an agent's class. Provides the names that they import."""

import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from protocol.errors import SettingsError
from rollout.environments.openrlhf.agent import FunctionAgent, InstanceAgent, MakeAgentPlay
from rollout.environments.user_modules import import_beside


class AgentInstanceBase:
    """OpenRLHF's base class of one conversation's environment."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("AgentInstance has no step")


class AgentExecutorBase:
    """OpenRLHF's base class of executors. Sluice never runs one: it plays the conversation itself."""

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


def load_agent(path: Path) -> MakeAgentPlay:
    """Return the environment that plays the agents of this file. Runs the file. Raises: SettingsError."""
    if not path.is_file():
        raise _error(path, "there is no such file. Give the path of a Python file.")
    offer_base_classes()
    import_beside(path)
    try:
        code = compile(path.read_bytes(), str(path), "exec")
        module = _run(code, path)
    except (Exception, SystemExit) as error:  # a user's code may raise anything, and end itself as scripts do
        raise _error(path, f"it cannot be loaded: {type(error).__name__}: {error}") from error
    if (found := _agent_class(module, path)) is not None:
        return MakeAgentPlay(lambda: InstanceAgent(found))
    if not inspect.iscoroutinefunction(getattr(module, "step", None)):
        raise _error(path, "it has neither a class AgentInstance nor an `async def step(observation, action, label)`.")
    # Such a file keeps a conversation's state in its module, so each conversation gets a module of its own.
    return MakeAgentPlay(lambda: FunctionAgent(_run(code, path).step))


def offer_base_classes() -> None:
    """Make `from openrlhf.utils.agent import ..` work in this process, unless OpenRLHF is installed."""
    if _MODULES[0] in sys.modules or importlib.util.find_spec(_MODULES[0]) is not None:
        return
    for name in _MODULES:
        module = ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
    vars(sys.modules[_MODULES[-1]]).update(_NAMES)


def _run(code: CodeType, path: Path) -> Any:
    module = ModuleType(f"agent_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up here
    exec(code, vars(module))  # noqa: S102  the user's own file
    return module


def _agent_class(module: ModuleType, path: Path) -> type[Any] | None:
    """Return the agent class: AgentInstance, or the file's only class with `step`."""
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    defined_here = [each for each in classes if each.__module__ == module.__name__]
    executors = [each for each in defined_here if "execute" in vars(each)]
    agents = [each for each in defined_here if inspect.iscoroutinefunction(getattr(each, "step", None))]
    for executor in executors:
        if not _only_calls_base(vars(executor)["execute"]):
            raise _error(
                path,
                f"{executor.__name__} has an `execute` of its own, which drives the engine itself. Move its work "
                "into the reset and step of an AgentInstance, or write an environment (docs/do/environments.md).",
            )
    named = [each for each in agents if each.__name__ == "AgentInstance"]
    if not named and len(agents) > 1:
        raise _error(
            path, f"it has the classes {', '.join(found.__name__ for found in agents)}. Name one AgentInstance."
        )
    return next(iter(named or agents), None)


def _only_calls_base(execute: Any) -> bool:
    """Return whether an executor's method only calls its base's, as in the examples of generation 3."""
    return inspect.isfunction(execute) and set(execute.__code__.co_names) <= {"super", "execute"}


def _error(path: Path, problem: str) -> SettingsError:
    return SettingsError(f"settings: rollout.environment = openrlhf_agent:{path}: {problem}")
