"""Where the state of each role lies in a checkpoint, and that older checkpoints are read."""

from pathlib import Path
from typing import cast

import pytest

from learner.models.policy import PolicyEngine
from learner.models.roles import Roles


class FilePolicy:
    """A policy whose state is one file."""

    def __init__(self, weights: str) -> None:
        self.weights = weights

    def save_state(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(self.weights)

    def load_state(self, folder: Path) -> None:
        self.weights = (folder / "state.json").read_text()


def roles(weights: str) -> tuple[Roles, FilePolicy]:
    policy = FilePolicy(weights)
    return Roles(cast(PolicyEngine, policy)), policy


def test_policys_state_has_a_folder_of_its_own_and_is_read_from_there(tmp_path: Path) -> None:
    roles("trained")[0].save_state(tmp_path / "state")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")] == ["state/policy/state.json"]
    again, policy = roles("fresh")
    again.load_state(tmp_path / "state")
    assert policy.weights == "trained"


def test_state_of_a_checkpoint_from_before_roles_is_read(tmp_path: Path) -> None:
    FilePolicy("trained").save_state(tmp_path / "state")
    again, policy = roles("fresh")
    again.load_state(tmp_path / "state")
    assert policy.weights == "trained"


def test_state_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        roles("fresh")[0].load_state(tmp_path / "state")
