"""Makes the tools of a verl tools file: `tools: [{class_name, config: {type: native}, tool_schema}]`."""

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from protocol.errors import SettingsError
from protocol.one_line import one_line
from protocol.settings.tools import ToolsSettings
from rollout.environments.tool_use.tool_use import MakeToolUse
from rollout.environments.user_modules import import_beside, send_whole
from rollout.environments.verl.base_classes import function_schema_class, offer_base_classes
from rollout.environments.verl.tools import VerlTool, VerlToolbox


def load_verl_tools(path: Path, settings: ToolsSettings) -> MakeToolUse:
    """Return the environment with the tools of this file. Runs users' modules.

    Raises: SettingsError naming the entry and its mistake.
    """
    entries = _read_entries(path)
    # A tool's module may be in the folder of this file.
    offer_base_classes(str(path.resolve().parent))
    import_beside(path)
    tools: dict[str, VerlTool] = {}
    for place, entry in enumerate(entries):
        tool = _make_tool(path, f"tools[{place}]", entry)
        name = tool.schema["function"]["name"]
        if name in tools:
            raise _error(path, f"tools[{place}]: there are two tools with the name {name}.")
        tools[name] = tool
    return MakeToolUse(settings, lambda resources: VerlToolbox(tools, settings.reward))


def _read_entries(path: Path) -> list[Any]:
    """Return the entries of the list `tools`."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except OSError as error:
        raise _error(path, f"it cannot be read: {error.strerror}. Give the path of a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _error(path, f"it is not YAML: {one_line(error)}.") from None
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise _error(path, "it has no list `tools`.")
    if "${" in text:
        raise _error(path, "it has a value in ${..}, which is not filled in here. Write the value itself.")
    return entries


def _make_tool(path: Path, place: str, entry: Any) -> VerlTool:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise _error(path, f"{place} has no class_name.")
    config = dict(entry.get("config") or {})
    if (kind := config.get("type", "native")) != "native":
        raise _error(path, f"{place} has the type {kind}: only native tools are run here.")
    tool_class = _import_class(path, place, entry["class_name"])
    send_whole(path.resolve().parent)
    schema = entry.get("tool_schema")
    try:
        parsed = function_schema_class().model_validate(schema) if schema is not None else None
        tool = tool_class(config=config, tool_schema=parsed)
        if schema is None:
            schema = tool.get_openai_tool_schema().model_dump(exclude_unset=True, exclude_none=True)
        name = schema["function"]["name"]
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise _error(path, f"{place}: {entry['class_name']} cannot be made: {problem}") from error
    for method in ("create", "execute", "calc_reward", "release"):
        function: Any = getattr(tool, method, None)
        if not inspect.iscoroutinefunction(inspect.unwrap(function)):
            raise _error(path, f"{place}: {entry['class_name']} ({name}) has no `async def {method}`.")
    return VerlTool(tool, dict(schema))


def _import_class(path: Path, place: str, class_name: str) -> Any:
    module_name, _, name = class_name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        advice = "Put its module, and those of verl that it imports, into this file's folder or on PYTHONPATH."
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise _error(path, f"{place}: {class_name} cannot be imported: {problem}. {advice}") from error
    tool_class = getattr(module, name, None)
    if not inspect.isclass(tool_class):
        raise _error(path, f"{place}: {module_name} has no class {name}.")
    return tool_class


def _error(path: Path, problem: str) -> SettingsError:
    return SettingsError(f"settings: rollout.environment = verl_tools:{path}: {problem}")
