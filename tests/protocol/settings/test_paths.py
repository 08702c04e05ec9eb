"""Relative paths start in the command's folder, and are absolute in every other process."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.settings.loader import load_settings
from protocol.settings.paths import data_files, find_trained, user_files
from protocol.settings.settings import Settings


def resolved(folder: Path, *options: str) -> Settings:
    return load_settings(None, options, folder)


def test_relative_paths_start_in_the_commands_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    settings = resolved(
        tmp_path,
        *("--policy.model", "model", "--policy.warm_start.data", "sft/rows.jsonl", "--run.dir", "out"),
        *("--data.train", "train.jsonl", "--data.eval", "../held.jsonl", "--run.resume", "out/a/step_000001"),
        *("--rollout.environment", "games/chess.py:Chess"),
        *("--tools.mcp", '[{"name": "a", "command": ["./serve"]}, {"name": "b", "command": ["x"], "folder": "b"}]'),
    )
    assert [server.folder for server in settings.tools.mcp] == [f"{tmp_path}", f"{tmp_path}/b"]
    assert settings.policy.model == f"{tmp_path}/model"
    assert settings.policy.warm_start.data == f"{tmp_path}/sft/rows.jsonl"
    assert (settings.data.train, settings.data.eval) == (f"{tmp_path}/train.jsonl", f"{tmp_path}/../held.jsonl")
    assert (settings.run.dir, settings.run.resume) == (f"{tmp_path}/out", f"{tmp_path}/out/a/step_000001")
    assert settings.rollout.environment == f"{tmp_path}/games/chess.py:Chess"


def test_home_sign_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert resolved(tmp_path, "--data.train", "~/train.jsonl").data.train == "/home/ada/train.jsonl"


def test_absolute_paths_stay_as_they_are(tmp_path: Path) -> None:
    once = resolved(tmp_path, "--data.train", "train.jsonl", "--rollout.environment", "game.py:Game")
    assert Settings.model_validate(once.model_dump(), context={"folder": Path("/elsewhere")}) == once


def test_what_is_no_path_stays_as_it_is(tmp_path: Path) -> None:
    settings = resolved(tmp_path, "--policy.model", "Qwen/Qwen3-0.6B", "--rollout.environment", "games.chess:Chess")
    assert settings.policy.model == "Qwen/Qwen3-0.6B"
    assert settings.rollout.environment == "games.chess:Chess"


def test_path_behind_a_kind_of_environment_becomes_absolute(tmp_path: Path) -> None:
    settings = resolved(tmp_path, "--rollout.environment", "openrlhf_agent:agents/mine.py")
    assert settings.rollout.environment == f"openrlhf_agent:{tmp_path}/agents/mine.py"
    assert (settings.run.resume, settings.data.train, settings.data.eval) == ("auto", "", None)
    assert settings.policy.warm_start.data is None
    assert resolved(tmp_path, "--run.resume", "never").run.resume == "never"


def test_home_of_an_unknown_user_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"run.dir = .~nobody_here/runs. is wrong: .* user that this machine"):
        resolved(tmp_path, "--run.dir", "~nobody_here/runs")


@pytest.mark.parametrize("environment", ["mine.py:Env", "mine:Env", "verl_tools:tools.yaml"])
def test_files_of_the_user_are_those_that_the_environment_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str
) -> None:
    (tmp_path / "kit" / "parts").mkdir(parents=True)
    files = {
        "mine.py": "from half import HALF\nimport kit.parts.deep, numpy, rollout.server\nPATH = HERE / 'games.yaml'",
        "games.yaml": "interaction:\n- class_name: played.Game",
        "played.py": "open('data/words.txt')",
        "half.py": "import mine",
        "kit/__init__.py": "from . import near",
        "kit/near.py": "",
        "kit/parts/deep.py": "from ..far import FAR",
        "kit/far.py": "",
    }
    tools = {"tools.yaml": "tools:\n- class_name: 'mine.Tool'"} if ".yaml" in environment else {}
    data = {"data/words.txt": "a b", "other.json": "{}"}
    (tmp_path / "data").mkdir()
    for name, text in (files | tools | data).items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    given = resolved(tmp_path, "--rollout.environment", environment).rollout.environment
    assert {str(file.relative_to(tmp_path)) for file in user_files(given)} == {*files, *tools}
    assert data_files(user_files(given)) == [tmp_path / "data" / "words.txt"]


@pytest.mark.parametrize("given", ["/model", "/"])
def test_model_in_the_root_of_a_container_is_of_no_run(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: str(path) in ("/", "/model"))
    assert find_trained(given) == (given, None)
