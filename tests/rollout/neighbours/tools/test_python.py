"""What the policy reads of a program that it had run."""

import pytest

from protocol.errors import OperatorError
from protocol.sandbox.run import Limits, ProgramResult
from protocol.settings.tools import ToolsSettings
from rollout.environments.base import ToolRefusal
from rollout.neighbours.node import Node
from rollout.neighbours.tools.python import PythonTool, describe_run
from tests.fakes.rollout_fakes import make_keys, make_spec


@pytest.mark.parametrize(
    ("ran", "text"),
    [
        (ProgramResult("42\n", "a warning", "exit", 0), "42"),
        (ProgramResult("", "", "exit", 0), "Nothing was printed."),
        (ProgramResult("1\n", "Traceback\nValueError\n", "exit", 1), "1\nTraceback\nValueError"),
        (ProgramResult("1\n", "", "time", 0), "1\nError: it was ended after 10 s"),
        (ProgramResult("xx", "", "output", 0), "xx\nError: it was ended after 65536 bytes of output"),
        (ProgramResult("", "", "exit", 139), "Error: it was ended by signal 11"),
    ],
)
def test_run_is_told_as_what_was_printed_and_how_it_ended(ran: ProgramResult, text: str) -> None:
    assert describe_run(ran, Limits()) == text


async def test_each_call_is_a_program_of_its_own() -> None:
    tools = ToolsSettings(names=["python"], python_timeout_s=60.0)
    tool = PythonTool(make_spec().model_copy(update={"tools": tools}), Node(None, None, "t", make_keys()))
    try:
        await tool.check()
    except OperatorError as error:
        pytest.skip(str(error))
    assert await tool.answer({"code": "x = 12\nprint(x * x)"}) == "144"
    assert "NameError: name 'x' is not defined" in await tool.answer({"code": "print(x)"})
    with pytest.raises(ToolRefusal, match="the program has 100001 characters"):
        await tool.answer({"code": "#" * 100_001})
    await tool.close()
