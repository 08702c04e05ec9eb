"""Finds what an agent file has: a function `step`, or a class of an agent."""

import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from protocol.errors import SettingsError
from rollout.environments.openrlhf.agent import Agent, FunctionAgent, InstanceAgent
from rollout.environments.openrlhf.base_classes import offer_base_classes
from rollout.environments.openrlhf.environment import MakeAgentPlay


def load_agent(path: Path) -> MakeAgentPlay:
    """Return the environment that plays the agents of this file. Runs it. Raises: SettingsError with what it lacks."""
    if not path.is_file():
        raise _error(path, "there is no such file. Give the path of a Python file.")
    offer_base_classes()
    try:
        code = compile(path.read_bytes(), str(path), "exec")
        module = _run(code, path)
    except (Exception, SystemExit) as error:  # a user's code may raise anything, and end itself as scripts do
        raise _error(path, f"it cannot be loaded: {type(error).__name__}: {error}") from error
    if (found := _agent_class(module, path)) is not None:
        return MakeAgentPlay(lambda: InstanceAgent(found))
    if not inspect.iscoroutinefunction(getattr(module, "step", None)):
        raise _error(path, "it has neither a class AgentInstance nor an `async def step(observation, action, label)`.")
    return MakeAgentPlay(_function_agents(code, path))


def _function_agents(code: CodeType, path: Path) -> Callable[[], Agent]:
    # Such a file keeps what it knows of a conversation in its module: each conversation has one of its own.
    return lambda: FunctionAgent(_run(code, path).step)


def _run(code: CodeType, path: Path) -> Any:
    module = ModuleType(f"agent_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}")
    module.__file__ = str(path)
    sys.modules.setdefault(module.__name__, module)  # dataclasses look their module up here
    exec(code, vars(module))  # noqa: S102  the user's own file
    return module


def _agent_class(module: ModuleType, path: Path) -> type[Any] | None:
    """Return the class with `step` whose objects are one conversation each: AgentInstance, or the file's only one."""
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    written = [found for found in classes if found.__module__ == module.__name__]
    executors = [found for found in written if "execute" in vars(found)]
    agents = [found for found in written if inspect.iscoroutinefunction(getattr(found, "step", None))]
    for executor in executors:
        if not _hands_on(vars(executor)["execute"]):
            raise _error(
                path,
                f"{executor.__name__} has an `execute` of its own, which drives the engine itself. Put what it does "
                "into the reset and step of an AgentInstance, or write an environment (rollout/README.md).",
            )
    named = [found for found in agents if found.__name__ == "AgentInstance"]
    if not named and len(agents) > 1:
        raise _error(
            path, f"it has the classes {', '.join(found.__name__ for found in agents)}. Name one AgentInstance."
        )
    return next(iter(named or agents), None)


def _hands_on(execute: Any) -> bool:
    """Return whether an executor's method only calls the one that it overrides, as the examples of generation 3 do."""
    return inspect.isfunction(execute) and set(execute.__code__.co_names) <= {"super", "execute"}


def _error(path: Path, problem: str) -> SettingsError:
    return SettingsError(f"settings: rollout.environment = openrlhf_agent:{path}: {problem}")
