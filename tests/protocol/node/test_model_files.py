"""What a node tells of its model, and whether another node's folder holds the same."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from protocol.node.model_files import describe_model, description_digest


def write_model(folder: Path, weights: bytes = b"w" * 5000, hidden: int = 8) -> Path:
    """Write a model folder; weights: those behind the table of a safetensors file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": hidden}))
    (folder / "tokenizer.json").write_text("{}")
    table = json.dumps({"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    (folder / "model.safetensors").write_bytes(len(table).to_bytes(8, "little") + table + weights)
    return folder


def test_copy_of_a_model_is_the_same_whatever_its_path_and_times(tmp_path: Path) -> None:
    told = describe_model(write_model(tmp_path / "a"), "node")
    copy = write_model(tmp_path / "b")
    assert told.is_at(copy, with_weights=True)
    assert told.num_bytes == sum(path.stat().st_size for path in copy.iterdir())


def test_other_weights_of_one_shape_differ_for_those_who_use_them_alone(tmp_path: Path) -> None:
    told = describe_model(write_model(tmp_path / "a"), "node")
    trained = write_model(tmp_path / "b", weights=b"v" * 5000)
    assert not told.is_at(trained, with_weights=True)
    assert told.is_at(trained, with_weights=False)


def test_one_small_tensor_of_many_that_differs_is_noticed(tmp_path: Path) -> None:
    tensors = {"large": np.zeros((4000, 500), np.float32), "layers.0.bias": np.zeros(8, np.float32)}
    for name, bias in (("a", 0.0), ("b", 1e-3)):
        write_model(tmp_path / name)
        save_file({**tensors, "layers.0.bias": tensors["layers.0.bias"] + bias}, tmp_path / name / "model.safetensors")
    assert not describe_model(tmp_path / "a", "node").is_at(tmp_path / "b", with_weights=True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_other_description_is_another_model(tmp_path: Path, name: str) -> None:
    told = describe_model(write_model(tmp_path / "a"), "node")
    other = write_model(tmp_path / "b")
    (other / name).write_text((other / name).read_text().replace("{", "{ "))
    assert not told.is_at(other, with_weights=False)


def test_other_table_of_weights_is_another_model(tmp_path: Path) -> None:
    told = describe_model(write_model(tmp_path / "a"), "node")
    other = write_model(tmp_path / "b")
    whole = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(whole.replace(b'"U8"', b'"I8"'))
    assert not told.is_at(other, with_weights=False)


def test_folder_that_is_not_there_or_lacks_a_file_does_not_hold_the_model(tmp_path: Path) -> None:
    told = describe_model(write_model(tmp_path / "a"), "node")
    assert not told.is_at(tmp_path / "nowhere", with_weights=False)
    part = write_model(tmp_path / "b")
    (part / "model.safetensors").unlink()
    assert not told.is_at(part, with_weights=False)


def test_files_that_no_reader_opens_are_not_told(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a")
    for name in ("pytorch_model.bin", "README.md", ".gitattributes", "model.gguf"):
        (folder / name).write_bytes(b"x")
    (folder / "onnx").mkdir()
    assert sorted(describe_model(folder, "node").files) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_weights_of_the_older_form_are_told_where_there_are_no_others(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin" in describe_model(folder, "node").files


def test_description_leaves_weights_out(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "a"), write_model(tmp_path / "b", weights=b"v" * 100)
    assert description_digest(one) == description_digest(two)
    assert description_digest(one) != description_digest(write_model(tmp_path / "c", hidden=9))
