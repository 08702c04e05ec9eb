"""Each rank's folder of a model: the model itself on rank 0's node, the small files on others."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from learner.models.world import join_world
from learner.rank.start import check_same_code, find_models, record_models, use_threads
from protocol.errors import OperatorError
from protocol.node.small_model_files import read_small_files
from protocol.settings.settings import Settings
from tests.fakes.ports import free_port


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros(1)}, folder / "model.safetensors")
    return folder


def settings_of(model: Path) -> Settings:
    return Settings.model_validate({"policy": {"model": str(model)}})


def test_rank_0_uses_the_model_and_other_ranks_its_small_files(model: Path) -> None:
    files = {"policy.model": read_small_files(model, with_code=False)}
    assert find_models(settings_of(model), files, is_first=True) == {"policy.model": model}
    (found,) = find_models(settings_of(model), files, is_first=False).values()
    assert sorted(path.name for path in found.iterdir()) == ["config.json", "tokenizer.json"]


def test_another_model_of_the_same_name_on_rank_0s_node_is_refused(model: Path) -> None:
    files = {"policy.model": {"config.json": b"{}"}}
    with pytest.raises(
        OperatorError, match=r"is another model than on the command's node\. Copy the model to rank 0's"
    ):
        find_models(settings_of(model), files, is_first=True)


def test_a_model_that_rank_0s_node_lacks_is_named(model: Path) -> None:
    with pytest.raises(OperatorError, match=r"On rank 0's node .*: settings: policy.model = .*nowhere is not a folder"):
        find_models(settings_of(model / "nowhere"), {"policy.model": {}}, is_first=True)


def test_each_byte_of_a_model_is_in_the_record_of_the_runs_first_models(model: Path, tmp_path: Path) -> None:
    records = []
    for change in (lambda: None, _other_weight(model), lambda: (model / "tokenizer.json").write_text("{ }")):
        change()
        record_models(tmp_path, {"policy.model": model})
        records.append(json.loads((tmp_path / "models.json").read_text()))
    changed = [[name for name in one if one[name] != other[name]] for one, other in pairwise(records)]
    assert changed == [["policy.model, its weights"], ["policy.model, its other files"]]


def _other_weight(model: Path) -> Callable[[], None]:
    return lambda: save_file({"weight": np.ones(1)}, model / "model.safetensors")


def test_rank_that_has_a_gpu_and_a_torch_without_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(OperatorError, match=r"This rank has GPU 3 of .*sees none .*SLUICE_LOCK=gpu.*--num-gpus 0"):
        join_world(0, 1, "127.0.0.1", 0, 5.0)


def test_a_rank_shares_its_own_nodes_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(os, "cpu_count", lambda: 112)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    for num_ranks in (8, 200):  # of this node
        use_threads(Settings(), num_ranks)
    use_threads(Settings.model_validate({"learner": {"num_threads": 3}}), 8)
    assert used == [14, 1, 3]


def _told_of_code(rank: int, port: int) -> str:
    join_world(rank, 2, "127.0.0.1", port, 60.0)
    check_same_code({"/code/loss.py": "one"})
    try:
        check_same_code({"/code/loss.py": "one", "/code/helper.py": f"of rank {rank}"})
    except OperatorError as error:
        return str(error)
    return ""


def test_every_rank_refuses_code_that_differs_between_nodes() -> None:
    port = free_port()
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        told = list(pool.map(_told_of_code, range(2), [port, port]))
    assert told[0] == told[1]
    assert told[0].startswith("/code/helper.py on node ")
