"""`python(code)`: the output of a program, run in the sandbox in a process of its own."""

from collections.abc import Mapping
from typing import Any

from protocol.errors import NeighbourError, OperatorError
from protocol.sandbox.run import Limits, ProgramResult, Sandbox
from protocol.settings.run_spec import RunSpec
from rollout.environments.base import ToolRefusal
from rollout.environments.timed_calls import timed_call
from rollout.neighbours.node import Node
from rollout.neighbours.tools.tool import Tool, function_schema

_MAX_CHARACTERS = 100_000


class PythonTool(Tool):
    """Each call runs a new program, without state of earlier ones."""

    schema = function_schema(
        "python",
        "Runs a Python program and returns what it prints. It has the standard library, no network and no files.",
        code="The whole program. It has to print what you want to know.",
    )

    def __init__(self, spec: RunSpec, node: Node) -> None:
        self._sandbox = Sandbox(is_isolated=not spec.tools.python_unsafe)
        self._limits = Limits(wall_s=spec.tools.python_timeout_s, memory_bytes=spec.tools.python_memory_mb << 20)

    async def __call__(self, code: str) -> str:
        """Raises: ToolRefusal for a program that is too long, NeighbourError when the sandbox itself failed."""
        if len(code) > _MAX_CHARACTERS:
            raise ToolRefusal(f"the program has {len(code)} characters, at most {_MAX_CHARACTERS}")
        try:
            with timed_call("tool", "python"):
                return describe_run(await self._sandbox.run(code, limits=self._limits), self._limits)
        except (NeighbourError, OperatorError, OSError) as error:
            raise NeighbourError("python", str(error)) from error

    async def answer(self, arguments: Mapping[str, Any]) -> str:
        return await self(arguments["code"])

    async def check(self) -> None:
        """Raises: OperatorError with the remedy when this machine has no sandbox."""
        await self._sandbox.check()

    async def close(self) -> None:
        self._sandbox.close()


def describe_run(ran: ProgramResult, limits: Limits) -> str:
    """Return the text that the policy reads of a run: its output, its errors, and the reason of an abnormal end."""
    parts = [ran.output.rstrip()]
    if ran.how != "exit" or ran.exit_code:
        parts.append(ran.errors.strip())
    if ran.how == "time":
        parts.append(f"Error: it was ended after {limits.wall_s:g} s")
    elif ran.how == "output":
        parts.append(f"Error: it was ended after {limits.output_bytes} bytes of output")
    elif ran.exit_code > 128:
        parts.append(f"Error: it was ended by signal {ran.exit_code - 128}")
    return "\n".join(part for part in parts if part) or "Nothing was printed."
