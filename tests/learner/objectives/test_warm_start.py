"""What the warm start trains with, and when it finds an earlier result again."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from learner.objectives.warm_start import content_key, warm_start, warm_start_settings
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
from tests.fakes.ports import free_port

# A rank of two, each on a node of its own; prints the folder that it begins with.
_RANK = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from learner.objectives.warm_start import warm_start
from protocol.settings.settings import Settings
rank, port, policy, model = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
print(warm_start(Settings.model_validate({"policy": policy}), model, lambda text: None))
"""


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


@pytest.mark.parametrize("name", ["model.safetensors", "rows.jsonl", "config.json", "chat_template.jinja"])
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


def test_rank_0_finds_the_model_that_it_made_and_other_ranks_need_none(folder: Path, tmp_path: Path) -> None:
    settings, port, home = settings_of(folder), str(free_port()), tmp_path / "home"
    small_files = tmp_path / "small_files"
    small_files.mkdir()
    made = home / "cache" / f"warm_start-{content_key(settings, folder)}"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    save_file({"weight": np.zeros(1)}, made / "model.safetensors")
    ranks = []
    for rank, model in enumerate([folder, small_files]):
        command = [sys.executable, "-c", _RANK, str(rank), port, settings.policy.model_dump_json(), str(model)]
        environment = {**os.environ, "SLUICE_HOME": str(home)}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    assert [rank.communicate(timeout=240)[0] for rank in ranks] == [f"{made}\n", f"{small_files}\n"]
