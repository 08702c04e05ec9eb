"""The models of a run on a rank's node: where they are, or where they were copied to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.rank.own_models import with_own_models
from protocol.node.model_copy import ReadFile
from protocol.node.model_files import describe_model
from protocol.settings.settings import Settings
from tests.protocol.node.test_model_files import write_model


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    return Settings.model_validate({"policy": {"model": "mine"}, "critic": {"model": str(tmp_path / "critic")}})


def unread(node_id: str) -> ReadFile:
    def read(path: str, size: int) -> Iterator[bytes]:
        raise AssertionError(f"{path} is read")

    return read


def test_settings_stay_as_they_are_where_this_node_has_the_models(settings: Settings, tmp_path: Path) -> None:
    wanted = {
        "policy.model": describe_model(write_model(tmp_path / "policy"), "head"),
        "critic.model": describe_model(write_model(tmp_path / "critic", hidden=9), "head"),
    }
    assert with_own_models(settings, wanted, unread) == (settings, tmp_path / "policy")


def test_settings_name_the_copy_of_a_model_that_this_node_lacks(settings: Settings, tmp_path: Path) -> None:
    wanted = {
        "policy.model": describe_model(write_model(tmp_path / "policy"), "head"),
        "critic.model": describe_model(write_model(tmp_path / "critic", hidden=9), "head"),
    }
    far = (tmp_path / "critic").rename(tmp_path / "far")

    def reader(node_id: str) -> ReadFile:
        assert node_id == "head"
        return lambda path, size: iter([(far / Path(path).name).read_bytes()])

    own, policy = with_own_models(settings, wanted, reader)
    assert policy == tmp_path / "policy"
    assert wanted["critic.model"].is_at(Path(str(own.critic.model)), with_weights=True)
    assert Path(str(own.critic.model)).parent == tmp_path / "home" / "cache" / "models"
    assert own.model_copy(update={"critic": settings.critic}) == settings
