"""An environment's file is a user's code: whatever it does when it is read is told in one sentence."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.settings.paths import FILE_ENVIRONMENTS
from protocol.settings.rollout import BUNDLED_ENVIRONMENTS
from rollout.environments.agents import PlayedByAgents
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
