"""Names that tool classes import from verl, for machines without it: a base class, schemas, a decorator."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _OpenModel(BaseModel):
    """A schema that keeps keys it does not know, as JSON Schema has many."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_OpenModel):
    type: str | list[str]  # type names in JSON Schema
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_OpenModel):
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_OpenModel):
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(_OpenModel):
    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """A call's reply. Sluice's models read its text."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """Base class of tools. One object serves all conversations, each under an instance id."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        pass


def rollout_trace_op(function: _Function) -> _Function:
    """Return the function unchanged: Sluice does not record verl's traces."""
    return function


_SCHEMAS = (
    OpenAIFunctionPropertySchema,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
_MODULES: dict[str, dict[str, Any]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.base_tool": {"BaseTool": BaseTool, **{each.__name__: each for each in _SCHEMAS}},
    "verl.tools.schemas": {each.__name__: each for each in _SCHEMAS},
    "verl.utils": {},
    "verl.utils.reward_score": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
}

# Packages whose other modules are looked for in the tools file's folder, such as verl.tools.gsm8k_tool.
_OPEN_PACKAGES = ("verl.tools", "verl.utils.reward_score")
_offered: set[str] = set()  # folders of tools files that an installed verl was given


def offer_base_classes(folder: str) -> None:
    """Make `from verl.tools.base_tool import BaseTool` and such work in this process, unless verl is installed.

    folder: folder of the tools file, which may have copies of verl's tools and of the scorers that they import: newer
    releases of verl have none of their own.
    """
    if _is_verl_installed():
        for name in _OPEN_PACKAGES:
            with suppress(ImportError):  # the import of a tool says what is missing
                path = importlib.import_module(name).__path__
                path[:] = [*(each for each in path if each not in _offered), folder]
        _offered.add(folder)
        return
    for name, contents in _MODULES.items():
        module = ModuleType(name)
        module.__path__ = [folder] if name in _OPEN_PACKAGES else []
        vars(module).update(contents)
        sys.modules[name] = module
        # `import verl.tools.schemas` binds `verl` alone: the dotted name is looked up by attribute.
        package, _, attribute = name.rpartition(".")
        if package:
            setattr(sys.modules[package], attribute, module)


def _is_verl_installed() -> bool:
    known = sys.modules.get("verl")
    return (importlib.util.find_spec("verl") if known is None else known.__spec__) is not None


def function_schema_class() -> Any:
    """Return the class of a tool's schema: verl's own if it is installed."""
    return importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema
