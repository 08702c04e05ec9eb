"""What the warm start trains with, and when it finds an earlier result again."""

from pathlib import Path
from typing import Any

import pytest

from learner.objectives.warm_start import content_key, warm_start, warm_start_settings
from protocol.errors import OperatorError
from protocol.settings.settings import Settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return tmp_path


def settings_of(folder: Path, warm: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Settings:
    policy = {"warm_start": {"data": str(folder / "rows.jsonl"), **(warm or {})}} | sections.pop("policy", {})
    return Settings.model_validate({"policy": policy, **sections})


def test_warm_start_fits_the_model_itself_whatever_the_sampling_temperature(folder: Path) -> None:
    cold = settings_of(folder, rollout={"temperature": 0.5})
    assert warm_start_settings(cold, folder).temperature == 1.0
    assert content_key(cold, folder) == content_key(settings_of(folder), folder)


def test_warm_start_has_its_own_schedule_and_the_learners_clipping(folder: Path) -> None:
    warm = {"lr": 0.5, "lr_warmup_steps": 7, "max_steps": 70, "min_lr_ratio": 0.25, "betas": [0.1, 0.2]}
    found = warm_start_settings(settings_of(folder, warm, learner={"max_grad_norm": 0.125}), folder)
    assert (found.lr, found.warmup_steps, found.total_steps, found.min_lr_ratio) == (0.5, 7, 70, 0.25)
    assert (found.betas, found.schedule, found.max_grad_norm) == ((0.1, 0.2), "linear", 0.125)


@pytest.mark.parametrize(
    "changed",
    [
        {"learner": {"max_grad_norm": 0.01}},
        {"learner": {"weight_decay": 1.0}},
        {"learner": {"zero_stage": 2}},
        {"learner": {"deepspeed": {"zero_optimization": {"overlap_comm": False}}}},
        {"policy": {"dtype": "float32"}},
        {"warm": {"lr": 0.125}},
        {"warm": {"max_steps": 3}},
        {"warm": {"rows_per_step": 3}},
        {"warm": {"lr_warmup_steps": 3}},
        {"warm": {"min_lr_ratio": 0.75}},
        {"warm": {"betas": [0.5, 0.98]}},
    ],
    ids=str,
)
def test_changed_setting_makes_another_model(folder: Path, changed: dict[str, dict[str, Any]]) -> None:
    usual = settings_of(folder)
    if "policy" in changed:
        changed = {"policy": usual.policy.model_dump() | changed["policy"]}
    assert content_key(settings_of(folder, **changed), folder) != content_key(usual, folder)


@pytest.mark.parametrize("name", ["model.safetensors", "rows.jsonl", "config.json"])
def test_changed_file_makes_another_model(folder: Path, name: str) -> None:
    before = content_key(settings_of(folder), folder)
    (folder / name).write_text('{"vocab_size": 9}')
    assert content_key(settings_of(folder), folder) != before


def test_what_the_warm_start_does_not_take_leaves_the_model_as_it_is(folder: Path) -> None:
    others = settings_of(folder, run={"seed": 9, "name": "x"}, learner={"lr": 1.0, "loss": "reinforce"})
    assert content_key(others, folder) == content_key(settings_of(folder), folder)


def test_demonstrations_that_a_ranks_node_lacks_are_named_with_what_to_do(folder: Path) -> None:
    settings = settings_of(folder)
    (folder / "rows.jsonl").unlink()
    with pytest.raises(OperatorError) as caught:
        warm_start(settings, folder, lambda text: None)
    text = str(caught.value)
    assert text.startswith(f"policy.warm_start.data = {folder / 'rows.jsonl'} is not on the node of a learner rank (")
    assert "a disk that the command's node and those of the ranks share" in text
