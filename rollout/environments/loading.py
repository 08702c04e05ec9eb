"""Loads the environment that `rollout.environment` names: a bundled one, `module:Class` or `FILE.py:Class`."""

import hashlib
import importlib
import importlib.util
import inspect
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from protocol.errors import SettingsError
from protocol.settings.paths import environment_file
from protocol.settings.rollout import ENVIRONMENT_FORMS
from protocol.settings.tools import ToolsSettings
from rollout.environments.agents import AgentProgram, PlayedByAgents
from rollout.environments.base import MakeEnvironment, SingleTurn
from rollout.environments.openrlhf.load import load_agent
from rollout.environments.search import Search
from rollout.environments.tool_use.tool_use import make_tool_use
from rollout.environments.user_modules import forget_user_modules, import_beside
from rollout.environments.verl.load import load_verl_tools

BUNDLED: dict[str, Callable[[ToolsSettings], MakeEnvironment]] = {
    "single_turn": lambda tools: SingleTurn,
    "search": lambda tools: Search,
    "tools": make_tool_use,
    "agents": lambda tools: PlayedByAgents(None),
}
OF_FILES: dict[str, Callable[[Path, ToolsSettings], MakeEnvironment]] = {
    "agent": lambda path, tools: PlayedByAgents(_load_program(str(path))),
    "openrlhf_agent": lambda path, tools: load_agent(path),
    "verl_tools": load_verl_tools,
}


def load_environment(name: str, tools: ToolsSettings | None = None) -> MakeEnvironment:
    """Return the environment's class, or a function that makes its objects. Runs a user's modules from their files.

    tools: the run's settings; None: the defaults. Raises: SettingsError with the reason.
    """
    if name in BUNDLED:
        return BUNDLED[name](tools or ToolsSettings())
    forget_user_modules()
    if (file := environment_file(name)) is not None:
        kind, path = file
        return OF_FILES[kind](Path(path), tools or ToolsSettings())
    where, _, class_name = name.rpartition(":")
    if not where or not class_name.isidentifier():
        raise _error(name, f"expected one of {ENVIRONMENT_FORMS}.")
    module = _load_file(name, Path(where)) if where.endswith(".py") else _import_module(name, where)
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise _error(name, f"{where} has no class {class_name}. It has {', '.join(classes) or 'none'}.")
    _check_class(name, found)
    return cast(MakeEnvironment, found)


def required_tools(environment: MakeEnvironment) -> frozenset[str]:
    """Return the names of the tools that an environment uses. `uses_retriever = True` means "search"."""
    also = {"search"} if getattr(environment, "uses_retriever", False) else set()
    return frozenset(getattr(environment, "requires", ())) | also


def _check_class(name: str, found: type[Any]) -> None:
    for method in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(found, method, None)):
            raise _error(name, f"it has no `async def {method}`. See rollout/environments/base.py.")
    stop = getattr(found, "stop", None)
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        raise _error(name, f"its `stop` is {stop!r}, expected a tuple of strings such as () or ('</answer>',).")
    requires = getattr(found, "requires", ())
    if not isinstance(requires, set | frozenset | tuple | list) or not all(isinstance(tool, str) for tool in requires):
        raise _error(name, f"its `requires` is {requires!r}, expected names of tools such as {{'search'}}.")


def _load_program(where: str) -> AgentProgram:
    """Return the function named by FILE.py:function. Runs the file."""
    name = f"agent:{where}"
    path, _, function = where.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise _error(name, "expected agent:FILE.py:function.")
    module = _load_file(name, Path(path))
    found = getattr(module, function, None)
    if not inspect.isroutine(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise _error(name, f"{path} has no function {function}. It has {', '.join(functions) or 'none'}.")
    return cast(AgentProgram, found)


def _load_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        # The command has checked its own node already.
        problem = f"there is no file {path.resolve()} on node {socket.gethostname()}. Give the path of a Python file"
        raise _error(name, f"{problem} that every node with rollout servers has.")
    # One module name per path: two files may both be called environment.py.
    module_name = f"environment_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling look their module up here
    import_beside(path)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's code may raise anything, and end itself as scripts do
        raise _error(name, f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _import_module(name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's code may raise anything, and end itself as scripts do
        advice = "Install it, or put its folder on PYTHONPATH before the cluster starts."
        problem = f"{module_name} cannot be imported: {type(error).__name__}: {error}. {advice}"
        raise _error(name, problem) from error


def _error(name: str, problem: str) -> SettingsError:
    return SettingsError(f"settings: rollout.environment = {name}: {problem}")
