"""Which engines can serve which runs: the fingerprint of an engine's settings and its model's description."""

from pathlib import Path
from typing import Any

import pytest

from protocol.node.model_files import describe_model, description_digest
from protocol.settings.run_spec import EngineRequest


@pytest.fixture
def spec(tmp_path: Path) -> EngineRequest:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 128}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return EngineRequest(
        model=str(folder),
        dtype="float32",
        tensor_parallel_size=1,
        seed=0,
        max_model_len=512,
        trust_remote_code=False,
        weights_backend="gloo",
        engine_args={"max_num_seqs": 64},
    )


def test_fingerprint_is_the_same_for_another_folder_with_the_same_description(
    spec: EngineRequest, tmp_path: Path
) -> None:
    copy = Path(spec.model).rename(tmp_path / "elsewhere")
    (copy / "model.safetensors").write_bytes(b"other weights")
    moved = spec.model_copy(update={"model": str(copy)})
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_bytes((copy / name).read_bytes())

    assert moved.fingerprint() == spec.fingerprint()


def test_fingerprint_changes_with_the_tokenizer(spec: EngineRequest) -> None:
    before = spec.fingerprint()
    (Path(spec.model) / "tokenizer.json").write_text('{"version": "1.0"}')

    assert spec.fingerprint() != before


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"max_model_len": 1024}, {"engine_args": {"max_num_seqs": 32}}, {"seed": 1}],
    ids=["dtype", "max_model_len", "engine_args", "seed"],
)
def test_fingerprint_changes_with_a_setting(spec: EngineRequest, change: dict[str, Any]) -> None:
    assert spec.model_copy(update=change).fingerprint() != spec.fingerprint()


def test_fingerprint_is_the_same_on_a_node_that_lacks_the_folder(spec: EngineRequest, tmp_path: Path) -> None:
    files = describe_model(Path(spec.model), "node")
    asked = spec.model_copy(update={"description": description_digest(Path(spec.model)), "files": files})
    before = asked.fingerprint()
    Path(spec.model).rename(tmp_path / "elsewhere")

    assert asked.fingerprint() == before


def test_fingerprint_is_the_same_for_the_same_model_on_another_node(spec: EngineRequest) -> None:
    description = description_digest(Path(spec.model))
    asked = [
        spec.model_copy(update={"description": description, "files": describe_model(Path(spec.model), node_id)})
        for node_id in ("one", "two")
    ]

    assert asked[0].fingerprint() == asked[1].fingerprint()
