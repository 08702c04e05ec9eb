"""Files of the user's own code are looked for before anything starts."""

from pathlib import Path

import pytest

from learner.run.checks.user_code import check_user_code
from protocol.errors import OperatorError, SettingsError
from protocol.settings.settings import Settings
from rewards.user_function import UserFunction

CODE = "class Game: ...\ndef centred(rewards, lengths): ...\nplain = lambda *tokens: tokens\n"


def of(folder: Path, setting: str, name: str) -> Settings:
    (folder / "own.py").write_text(CODE)
    section, key = setting.split(".")
    return Settings.model_validate({section: {key: name}}, context={"folder": folder})


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("rollout.environment", "own.py:Game"),
        ("rollout.environment", "agent:own.py:centred"),
        ("rollout.environment", "agents"),
        ("learner.advantage", "own.py:centred"),
        ("learner.loss", "own.py:plain"),
        ("learner.correction", "some.module:name"),
    ],
)
def test_own_code_that_is_there_is_taken_from_the_commands_folder(tmp_path: Path, setting: str, name: str) -> None:
    check_user_code(of(tmp_path, setting, name))


@pytest.mark.parametrize(
    ("setting", "name", "problem"),
    [
        ("rollout.environment", "own.py:centred", "has no class centred. It has Game."),
        ("learner.advantage", "own.py:centered", "has no function centered. It has centred."),
        ("learner.advantage", "own.py:Game", "has no function Game. It has centred."),
        ("learner.correction", "other.py:cut", "there is no file {folder}/other.py. Give the path of a Python file."),
    ],
)
def test_own_code_that_is_not_there_is_refused_with_what_is(
    tmp_path: Path, setting: str, name: str, problem: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        check_user_code(of(tmp_path, setting, name))
    assert str(caught.value).startswith(f"settings: {setting} = {tmp_path}/")
    assert str(caught.value).endswith(problem.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("agent:own.py:Game", "/own.py has no function Game. It has centred."),
        ("agent:own.py", "expected agent:FILE.py:function."),
        ("agent:other.py:solve", "/other.py. Give the path of a Python file."),
    ],
)
def test_program_of_agents_that_is_not_there_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_user_code(of(tmp_path, "rollout.environment", name))
    assert str(caught.value).startswith("settings: rollout.environment = ")
    assert str(caught.value).endswith(problem)


def test_own_code_that_imports_a_file_which_a_package_hides_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def right(): ...\n")
    own = tmp_path / "hidden.py"
    own.write_text("import learner\nfrom rewards import right\nclass Game: ...\n")
    sentence = f"{own} imports rewards, which is Sluice's package and not {tmp_path}/rewards.py. Rename rewards.py."
    with pytest.raises(SettingsError) as caught:
        check_user_code(of(tmp_path, "rollout.environment", "hidden.py:Game"))
    assert str(caught.value).endswith(sentence)
    with pytest.raises(OperatorError) as refused:
        UserFunction(str(own))
    assert str(refused.value) == f"rewards: --function {sentence}"
