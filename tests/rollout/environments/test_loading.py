"""Loading of users' files: their errors are one sentence, and each run plays the files as they are now."""

import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from protocol.settings.paths import FILE_ENVIRONMENTS
from protocol.settings.rollout import BUNDLED_ENVIRONMENTS
from protocol.settings.tools import ToolsSettings
from rollout.environments.agents import PlayedByAgents
from rollout.environments.base import Resources, Task
from rollout.environments.loading import BUNDLED, OF_FILES, load_environment


def test_file_that_ends_itself_is_told_as_one_that_cannot_be_loaded(tmp_path: Path) -> None:
    script = tmp_path / "game.py"
    script.write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(SettingsError, match=r"game\.py cannot be loaded: SystemExit: 2"):
        load_environment(f"{script}:Game")


def test_settings_know_the_bundled_environments_by_name() -> None:
    assert tuple(BUNDLED) == BUNDLED_ENVIRONMENTS
    assert set(OF_FILES) == set(FILE_ENVIRONMENTS)


def test_program_of_agents_is_a_function_of_a_file(tmp_path: Path) -> None:
    script = tmp_path / "my_agent.py"
    script.write_text("async def solve(task):\n    return 1.0\n")
    loaded = load_environment(f"agent:{script}:solve")
    assert isinstance(loaded, PlayedByAgents)
    assert loaded.program is not None
    assert loaded.program.__name__ == "solve"
    with pytest.raises(SettingsError, match=r"my_agent\.py has no function other\. It has solve\."):
        load_environment(f"agent:{script}:other")
    with pytest.raises(SettingsError, match=r"expected agent:FILE\.py:function\."):
        load_environment(f"agent:{script}")


_GAME = """
from edited_folder import rules
from edited_reader import text
class Game:
    stop = ()
    def __init__(self, resources): pass
    async def reset(self, task): return "{version} " + text + " " + rules.text
    async def step(self, turn): ...
"""
_TOOL = """
from verl.tools.base_tool import BaseTool
class Echo(BaseTool):
    async def execute(self, instance_id, parameters, **options): return "{version}", 0.0, {{}}
"""
_TOOLS = """
tools:
- class_name: edited_tool.Echo
  tool_schema: {type: function, function: {name: echo, parameters: {type: object, properties: {}}}}
"""


@pytest.mark.parametrize("kind", ["module", "file", "verl_tools"])
async def test_run_plays_users_files_as_they_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tools.yaml").write_text(_TOOLS)
    names = {
        "module": "edited_game:Game",
        "file": f"{tmp_path / 'edited_game.py'}:Game",
        "verl_tools": f"verl_tools:{tmp_path / 'tools.yaml'}",
    }

    async def play() -> str:
        made: Any = load_environment(names[kind], ToolsSettings())
        if kind == "verl_tools":
            return str((await made.make_toolbox(Resources(1)).answer("echo", {})).text)
        return str(await made(Resources(1)).reset(Task("", None, {})))

    load_environment("single_turn")
    (tmp_path / "edited_folder").mkdir()
    played = []
    for version in ("first", "second"):
        (tmp_path / "edited_game.py").write_text(_GAME.format(version=version))
        (tmp_path / "edited_reader.py").write_text(f"text = {version!r}\n")
        (tmp_path / "edited_folder" / "rules.py").write_text(f"text = {version!r}\n")
        (tmp_path / "edited_tool.py").write_text(_TOOL.format(version=version))
        played.append(await play())

    each = ["first", "second"]
    assert played == (each if kind == "verl_tools" else [f"{version} {version} {version}" for version in each])


_ANY = """
import beside
try:
    from verl.tools.base_tool import BaseTool
except ImportError:
    BaseTool = object
class Game:
    stop = ()
    async def reset(self, task): ...
    async def step(self, turn): ...
class Echo(BaseTool):
    async def execute(self, instance_id, parameters, **options): ...
async def step(observation, action, label): ...
"""
_OWN_KINDS = ["{}/my.py:Game", "agent:{}/my.py:step", "openrlhf_agent:{}/my.py", "verl_tools:{}/tools.yaml"]


@pytest.mark.parametrize("name", _OWN_KINDS)
def test_run_gets_the_modules_beside_its_file_and_not_those_of_an_earlier_run(tmp_path: Path, name: str) -> None:
    load_environment("single_turn")
    for run in ("first", "second"):
        folder = tmp_path / run
        folder.mkdir()
        (folder / "beside.py").write_text(f"text = {run!r}\n")
        (folder / "my.py").write_text(_ANY)
        (folder / "tools.yaml").write_text(_TOOLS.replace("edited_tool", "my"))
        load_environment(name.format(folder), ToolsSettings())
        assert sys.modules["beside"].text == run
    load_environment("single_turn")
